"""Simulated nodes: the tool that makes them, and whether this machine can have them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path(os.environ.get("FCDP_CLUSTER_TOOL", ROOT.parent / "shared" / "tools" / "cluster.py"))


def _missing() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not all(shutil.which(tool) for tool in ("ip", "tc")):
        return "ip and tc (iproute2) are not installed"
    if not TOOL.is_file():
        return f"no cluster tool at {TOOL}; set FCDP_CLUSTER_TOOL"
    return None


_reason = _missing()

# Simulated nodes exist on Linux, for root, with the tool alone; the reason says what is missing.
needs_nodes = [
    pytest.mark.cluster,
    pytest.mark.skipif(_reason is not None, reason=_reason or "nothing is missing"),
]
"""Marks of tests on simulated nodes."""
