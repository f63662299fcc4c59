"""The host memory that a process may use: control groups, free memory, locked memory.

A file that cannot be read sets no limit.  root, in every function: the folder to use in place of `/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

from fcdp_compile.errors import ArgumentError

UNLIMITED = 2**63 - 1
"""The bytes of a budget that nothing limits: the largest number that ranks can exchange."""

_ROOT = Path("/")
_CAP_IPC_LOCK = 14  # linux/capability.h


class Limit(Enum):
    """What limits a budget, as text for messages; ranks exchange a member's position."""

    NOTHING = "no known limit"
    AVAILABLE = "the memory that is available"
    CGROUP = "the memory limit of the control group"
    LOCKED = "the limit of locked memory (ulimit -l)"
    OPTION = "options={'host_memory': …}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBudget:
    """Bytes of host memory that the cache may take on each rank, and the limit that they come from."""

    bytes: int
    limit: Limit

    def __post_init__(self) -> None:
        if self.bytes < 0:
            raise ArgumentError(f"a budget cannot be {self.bytes} bytes; it must be at least 0")


def detect(*, ranks_on_machine: int, ranks_in_group: int, root: Path = _ROOT) -> HostBudget:
    """A rank's share of nine tenths of the free memory; the rest is for batches, checkpoints and the like.

    ranks_on_machine: the ranks that share this machine's memory.  ranks_in_group: the ranks that share this
    rank's control group, fewer if each rank has its own container.
    """
    free = [(UNLIMITED, Limit.NOTHING)]
    if (left := available_bytes(root)) is not None:
        free.append((left * 9 // 10 // ranks_on_machine, Limit.AVAILABLE))
    if (left := cgroup_bytes(root)) is not None:
        free.append((left * 9 // 10 // ranks_in_group, Limit.CGROUP))
    smallest, limit = min(free, key=lambda pair: pair[0])
    return HostBudget(bytes=smallest, limit=limit)


def available_bytes(root: Path = _ROOT) -> int | None:
    """The memory that the kernel expects to be usable without swapping (MemAvailable)."""
    fields = _fields(root / "proc/meminfo")
    kib = _number(fields.get("MemAvailable:", "").split(" ")[0])
    return None if kib is None else 1024 * kib


def total_bytes(root: Path = _ROOT) -> int | None:
    """The machine's memory, or the limit of this process's control groups if that is smaller."""
    kib = _number(_fields(root / "proc/meminfo").get("MemTotal:", "").split(" ")[0])
    limits = [limit for folder, names in _groups(root) if (limit := _limit_in(folder, names))]
    return min(limits if kib is None else [1024 * kib, *limits], default=None)


def lockable_bytes(root: Path = _ROOT) -> int | None:
    """RLIMIT_MEMLOCK of this process; None if it is unlimited or the process may exceed it."""
    capabilities = _fields(root / "proc/self/status").get("CapEff:", "0")
    if int(capabilities, 16) >> _CAP_IPC_LOCK & 1:
        return None
    for line in _lines(root / "proc/self/limits"):
        if line.startswith("Max locked memory"):
            return _number(line.removeprefix("Max locked memory").split()[0])
    return None


def cgroup_bytes(root: Path = _ROOT) -> int | None:
    """The memory left in this process's control group or in a group above it (version 2 and 1); the smallest.

    Cached files that the kernel can drop do not count as used (the kubelet does the same).
    """
    found = (_left_in(folder, names) for folder, names in _groups(root))
    return min((n for n in found if n is not None), default=None)


def _groups(root: Path) -> Iterator[tuple[Path, _Names]]:
    """The folders of this process's control group and of the groups above it."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            mount, names = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        # In a container the path may be the host's; a folder that does not exist here sets no limit.
        inner = PurePosixPath(path.lstrip("/"))
        yield from ((mount / folder, names) for folder in (inner, *inner.parents))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    limit: str
    used: str
    droppable: str


_V1 = _Names(
    limit="memory.limit_in_bytes", used="memory.usage_in_bytes", droppable="total_inactive_file"
)
_V2 = _Names(limit="memory.max", used="memory.current", droppable="inactive_file")


def _left_in(folder: Path, names: _Names) -> int | None:
    if (limit := _limit_in(folder, names)) is None:
        return None
    used = _number(_text(folder / names.used)) or 0
    droppable = _number(_fields(folder / "memory.stat").get(names.droppable, "")) or 0
    return max(0, limit - max(0, used - droppable))


def _limit_in(folder: Path, names: _Names) -> int | None:
    limit = _number(_text(folder / names.limit))
    # Version 1 says "unlimited" as a number of pages.
    return None if limit is None or limit >= 2**62 else limit


def _fields(path: Path) -> dict[str, str]:
    """The lines of a file as first word -> rest."""
    pairs = (line.split(None, 1) for line in _lines(path))
    return {pair[0]: pair[1].strip() for pair in pairs if len(pair) == 2}


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None  # "max" and "unlimited" are not numbers


def _lines(path: Path) -> list[str]:
    return _text(path).splitlines()


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
