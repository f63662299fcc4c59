"""Simulated nodes on this machine: start jobs on them, and skip tests if the machine cannot have nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.cluster.nodes import why_not

ROOT = Path(__file__).resolve().parents[2]

_reason = why_not()

needs_nodes = [
    pytest.mark.cluster,
    pytest.mark.skipif(_reason is not None, reason=_reason or "nothing is missing"),
]
"""Marks of tests on simulated nodes, which need root and iproute2; the reason says what is missing."""


def command(*arguments: object) -> list[str]:
    """The command line of `python -m benchmarks.cluster`."""
    return [sys.executable, "-m", "benchmarks.cluster", *map(str, arguments)]


def environment() -> dict[str, str]:
    """This process's environment, extended so that jobs import the checkout from any folder."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_on_nodes(arguments: Sequence[object]) -> subprocess.CompletedProcess[str]:
    """Run a job to its end.

    The arguments need a --timeout: killing the launcher outright would leave its nodes behind.
    """
    return subprocess.run(
        command(*arguments), env=environment(), capture_output=True, text=True, check=False
    )
