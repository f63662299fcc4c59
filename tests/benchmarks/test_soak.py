"""The soak runs for a few steps; people read the results of thousands of steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.rare
@pytest.mark.distributed
def test_a_few_steps_print_what_the_process_holds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--steps=6", "--every=3", "--save-every=2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if re.match(r" *\d+ ", line)]
    assert [row[0] for row in rows] == ["3", "6"], done.stdout
    _, loss, rss, trimmed, threads, files, slabs, seconds = map(float, rows[-1])
    assert 0 < loss < 10
    assert 50 < trimmed <= rss < 5000
    assert min(threads, files, slabs, seconds) > 0
