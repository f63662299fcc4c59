"""Install torch: a CPU build if there is no card and pip sees a CPU build.

    python -m benchmarks.versions.torch_build [REQUIREMENT]

The Makefile runs this in a fresh environment before it installs anything else, so this needs only the
standard library.  REQUIREMENT is anything that pip takes: torch==2.13.0, a wheel, an address.  Without
REQUIREMENT, an installed torch stays if it is in the range of pyproject.toml.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_HOW = (
    "no NVIDIA driver and no ROCm here, and pip sees no CPU build of {range}: it takes what it finds, which "
    "may bring gigabytes of CUDA libraries; to avoid that, name an index of CPU builds in pip's "
    "extra-index-url (pytorch.org says which), or a wheel by make TORCH=..."
)


def supported_range() -> str:
    """Return the requirement for torch in pyproject.toml, such as torch>=2.11,<2.16."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (found,) = (d for d in project["dependencies"] if re.match(r"torch\W", d))
    return str(found)


def in_range(version: str, supported: str) -> bool:
    """Whether a version, with or without a local label, is one of torch>=A,<B."""
    bounds = re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", supported)
    assert bounds, supported
    return _release(bounds[1]) <= _release(version) < _release(bounds[2])


def has_card(root: Path = Path("/")) -> bool:
    """Whether there is an NVIDIA driver or ROCm."""
    if any(shutil.which(tool) for tool in ("nvidia-smi", "rocminfo")):
        return True
    if any((root / place).exists() for place in ("proc/driver/nvidia", "opt/rocm")):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cpu_builds(python: str) -> list[str]:
    """Return the CPU builds of torch that pip sees for a Python, newest first, such as 2.13.0+cpu."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
    # The output is needed even if pip is configured to be quiet.
    environment = os.environ | {"PIP_QUIET": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    listed = re.search(r"^Available versions: (.*)$", done.stdout, re.MULTILINE)
    return [v for v in listed[1].split(", ") if v.endswith("+cpu")] if listed else []


def install(python: str, given: str = "", *, card: bool) -> int:
    """Let pip install torch for a Python; returns pip's exit code."""
    supported = supported_range()
    # The narrowest requirement comes first: pip downloads the best wheel for it before it reads the others.
    wanted = [supported]
    if given:
        wanted = [given, supported]  # refuses a torch outside of the range
    elif not card and not in_range(_installed(python), supported):
        builds = [f"torch=={v}" for v in cpu_builds(python) if in_range(v, supported)]
        wanted = builds[:1] or wanted
        if not builds:
            print(_HOW.format(range=supported), file=sys.stderr)
    return subprocess.run([python, "-m", "pip", "install", *wanted], check=False).returncode


def _installed(python: str) -> str:
    """Return the version of torch that a Python has, or 0."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "0"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0]))


if __name__ == "__main__":
    sys.exit(install(sys.executable, *sys.argv[1:2], card=has_card()))
