"""A clone in an empty folder is complete: its tests and its benchmark need no file outside of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_PLUGIN = """
import json, os

def pytest_collection_modifyitems(items):
    found = []
    for item in items:
        marks = [m for m in item.iter_markers("skipif") if m.args[0]] + list(item.iter_markers("skip"))
        found += [(item.nodeid, mark.kwargs["reason"]) for mark in marks]
    cluster = [i.nodeid for i in items if i.get_closest_marker("cluster")]
    _write(skipped=found, cluster=cluster)

def pytest_collectreport(report):
    if report.skipped:
        _write(skipped=[(report.nodeid, report.longrepr[2])], cluster=[])

def _write(**found):
    with open(os.environ["FOUND"], "a") as file:
        print(json.dumps(found), file=file)
"""
_MAY_BE_MISSING = (
    "needs root",
    "not found; install iproute2",
    "`ip netns add ",  # a container that may not make namespaces
    "no token bucket filter",
    "needs a CUDA device",
    "torch before 2.15",
    "there is a GPU",
    "is not installed",
    "needs /dev/full",
    "; set FCDP_",
    "not a git checkout",
    "needs transformers",
    "compiler",
)
"""Parts of the allowed reasons of skips: a machine may lack these, or a test runs only on request."""


@pytest.mark.rare
def test_nothing_is_missing_in_a_clone(tmp_path: Path) -> None:
    """Copies the files that git does not ignore, as they are now, and collects the tests that may skip."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    clone = tmp_path / "clone"
    may_skip = []
    for name in listed.stdout.split("\0"):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
            is_test = Path(name).name.startswith("test_") and Path(name) != Path(
                "tests/house/test_clone.py"
            )
            if is_test and re.search(r"skip|needs_", (ROOT / name).read_text(encoding="utf-8")):
                may_skip.append(name)
    (tmp_path / "report_skips.py").write_text(_PLUGIN)
    found_file = tmp_path / "found.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "FOUND": str(found_file)}
    collect = ["-m", "pytest", "--collect-only", "-qq", "-p", "report_skips", *may_skip]
    collected = subprocess.run(
        [sys.executable, *collect],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout + collected.stderr
    records = [json.loads(line) for line in found_file.read_text().splitlines()]
    skipped = {name: why for record in records for name, why in record["skipped"]}
    for name, why in skipped.items():
        assert any(part in why for part in _MAY_BE_MISSING), f"{name} skips in a clone: {why}"
        assert str(tmp_path) not in why
    on_nodes = {name for record in records for name in record["cluster"]}
    assert on_nodes

    bench = [sys.executable, "-m", "benchmarks.launch"]
    can = [
        subprocess.run(bench, cwd=place, capture_output=True, text=True, check=False)
        for place in (ROOT, clone)
    ]
    assert (can[0].returncode, can[0].stderr) == (can[1].returncode, can[1].stderr)
    assert bool(on_nodes & set(skipped)) == bool(can[1].returncode)
