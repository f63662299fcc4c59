"""The notebook of the first hour runs from top to bottom in one process, and again, without Jupyter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "first_hour.ipynb"


def _cells() -> list[dict[str, object]]:
    return [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]


def test_the_notebook_stores_no_output() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in _cells())


@pytest.mark.rare
def test_every_cell_runs_and_runs_again(tmp_path: Path) -> None:
    """In `__main__`, as a kernel does it; a reader runs cells twice."""
    sources = ["".join(cell["source"]) for cell in _cells()]
    cells = [f"exec(compile({s!r}, 'cell {i}', 'exec'), globals())" for i, s in enumerate(sources)]
    script = tmp_path / "cells.py"
    script.write_text("\n".join([*cells, "print('first time')", *cells, "print('second time')"]))
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=env | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("the model is sharded already; shard a model once") == 2
    assert "second time" in done.stdout
