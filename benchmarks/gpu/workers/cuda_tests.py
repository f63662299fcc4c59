"""The tests of the repository that need a CUDA device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.results import CudaTests
from benchmarks.gpu.workers.setting import NotRunError, Setting


def cuda_tests(setting: Setting) -> CudaTests:
    """Run `pytest -m gpu` on the files with tests marked gpu.

    Other files are not collected: they may import packages of the extra "test", which may be missing here.
    """
    if importlib.util.find_spec("pytest") is None:
        raise NotRunError("pytest is not installed")
    # In the working folder, where the driver has linked the package: in the checkout Python would find it
    # without the parts that `package-dir` maps into it.
    files = [f for f in sorted(Path("tests").rglob("test_*.py")) if "mark.gpu" in f.read_text()]
    if not files:
        raise NotRunError("no test is marked gpu")
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        # Without the options of pyproject.toml, which name plugins that may be missing.
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-o", "addopts="]
        command += ["--import-mode=importlib", "-q", f"--junitxml={report}", *map(str, files)]
        ended = subprocess.run(command, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest ended with exit status {ended.returncode} and no report")
        found = read_report(report)
    if not (setting.is_cuda or found.failed):
        raise NotRunError(f"there is no CUDA device for {found.skipped} tests")
    return found


def read_report(path: Path) -> CudaTests:
    """Read the report that pytest wrote with --junitxml."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failures = {
        f"{case.get('classname')}::{case.get('name')}": (element.get("message") or "").strip()
        for case in cases
        for element in case
        if element.tag in ("failure", "error")
    }
    skipped = sum(case.find("skipped") is not None for case in cases)
    return CudaTests(
        passed=len(cases) - len(failures) - skipped,
        failed=len(failures),
        skipped=skipped,
        failures=[f"{name}: {(text.splitlines() or [''])[0]}" for name, text in failures.items()],
    )
