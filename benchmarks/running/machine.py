"""The machine that the numbers come from: hardware, versions, and the commit of this repository."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "deepspeed", "numpy")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecord:
    """A machine.  versions: "name version" of each package.  commit: of this repository, empty if unknown."""

    processor: str
    cores: int
    memory_bytes: int
    system: str
    versions: list[str]
    commit: str

    @staticmethod
    def here() -> MachineRecord:
        """Describe this machine."""
        return MachineRecord(
            processor=_match(Path("/proc/cpuinfo"), r"model name\s*:\s*(.+)") or platform.machine(),
            cores=len(os.sched_getaffinity(0)),
            memory_bytes=1024 * int(_match(Path("/proc/meminfo"), r"MemTotal:\s*(\d+) kB") or 0),
            system=f"{platform.system()} {platform.release()}",
            versions=[f"Python {platform.python_version()}", *map(_version, _PACKAGES)],
            commit=commit(),
        )


def _match(path: Path, pattern: str) -> str:
    found = re.search(pattern, path.read_text()) if path.exists() else None
    return found[1].strip() if found else ""


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def commit() -> str:
    """Return `git describe` of this repository; empty if this is no git repository."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
