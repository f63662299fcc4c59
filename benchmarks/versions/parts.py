"""The parts to try on each torch: groups of tests, and the demo, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.running.machine import commit
from benchmarks.versions.environments import ROOT
from benchmarks.versions.results import Result

_DISTRIBUTED = "tests/distributed/test_"
# Tests that depend little on torch (documents, reports, packaging) or take long (examples, the zoo).
_ELSEWHERE = (
    "docs",
    "benchmarks",
    "examples",
    "zoo",
    "cluster",
    "test_packaging.py",
    "test_timeline_browser.py",
)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsPart:
    """A part: its name, a description for the report, and the arguments for Python."""

    name: str
    about: str
    arguments: tuple[str, ...]
    limit_s: int


def _tests(
    name: str, about: str, *files: str, limit_s: int = 1800, also: Sequence[str] = ()
) -> VersionsPart:
    arguments = ("-m", "pytest", "-q", "-m", "not slow and not rare", *also, *files)
    return VersionsPart(name=name, about=about, arguments=arguments, limit_s=limit_s)


PARTS = (
    _tests(
        "parity",
        "losses, gradients and parameters, compared with a model that is not sharded",
        f"{_DISTRIBUTED}parity.py",
        f"{_DISTRIBUTED}parity_bitwise.py",
    ),
    _tests("bytes", "counted bytes, planned bytes and the formula agree", f"{_DISTRIBUTED}bytes.py"),
    _tests(
        "staleness",
        "every way to change a parameter is noticed",
        f"{_DISTRIBUTED}staleness.py",
        f"{_DISTRIBUTED}staleness_between.py",
    ),
    _tests(
        "inductor",
        "segments compiled by Inductor",
        f"{_DISTRIBUTED}inductor.py",
        "tests/backend/test_compute.py",
    ),
    VersionsPart(
        name="demo",
        about="`make demo` with four steps for each of its two trainings",
        arguments=(
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"),
            *("examples/lora_finetune.py", "--nodes", "2", "--steps", "4", "--base-steps", "4"),
        ),
        limit_s=900,
    ),
    _tests(
        "fast",
        "tests in one process: passes, planner, runtime, checkpoints, loading",
        "tests",
        also=(
            *("-m", "not slow and not rare and not distributed and not cluster"),
            *(f"--ignore=tests/{place}" for place in _ELSEWHERE),
        ),
        limit_s=5400,
    ),
)  # fmt: skip


def run(part: VersionsPart, python: Path, logs: Path) -> Result:
    """Run a part with an environment's Python; the output goes to a file in `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{part.name}.log"
    environment = os.environ | {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(logs / "inductor"),
    }
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        try:
            code = subprocess.run(
                [str(python), *part.arguments],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=part.limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    text = log.read_text(encoding="utf-8", errors="replace")
    failures = tuple(sorted(set(_FAILED.findall(text))))
    if code and not failures:
        failures = (
            f"exit {code}: {text.strip().splitlines()[-1][:200] if text.strip() else 'silent'}",
        )
    return Result(
        python=_ask(python, "import platform; print(platform.python_version())"),
        torch=_ask(python, "import importlib.metadata as m; print(m.version('torch'))"),
        part=part.name,
        passed=_count(text, "passed") if "pytest" in part.arguments else int(not code),
        skipped=_count(text, "skipped"),
        failures=failures,
        seconds=round(time.monotonic() - began, 1),
        commit=commit() or "unknown",
    )


def _count(text: str, outcome: str) -> int:
    """Read a count from pytest's last line, such as: 8 passed, 2 skipped in 3.1s."""
    found = re.findall(rf"(\d+) {outcome}\b.* in [\d.:]+", text)
    return int(found[-1]) if found else 0


def _ask(python: Path, code: str) -> str:
    return subprocess.check_output([str(python), "-c", code], text=True).strip()
