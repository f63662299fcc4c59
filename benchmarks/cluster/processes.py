"""The processes of a network namespace, and how they are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

NAMESPACES = Path("/var/run/netns")
"""Where `ip netns` keeps one file for each namespace that has a name."""


def processes_of(namespace: str) -> list[int]:
    """The ids of the processes whose network is that namespace; a process that has ended has none."""
    try:
        wanted = (NAMESPACES / namespace).stat()
    except FileNotFoundError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                own = (entry / "ns" / "net").stat()
                if (own.st_dev, own.st_ino) == (wanted.st_dev, wanted.st_ino):
                    found.append(int(entry.name))
    return found


def is_rank(pid: int) -> bool:
    """Whether torchrun has started this process as a rank; it tells its ranks their number in LOCAL_RANK."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(entry.startswith(b"LOCAL_RANK=") for entry in environment.split(b"\0"))


def send(number: int, pids: Iterable[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_processes(namespaces: Iterable[str], *, patience_s: float = 3.0) -> None:
    """End what runs in the namespaces: SIGTERM, and SIGKILL for what is still there after `patience_s`."""
    names = list(namespaces)

    def left() -> set[int]:
        return {pid for name in names for pid in processes_of(name)}

    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + patience_s
        told: set[int] = set()
        while (pids := left()) and time.monotonic() < until:
            send(number, pids - told)
            send(signal.SIGCONT, pids - told)  # a stopped process takes SIGTERM once it runs
            told |= pids
            time.sleep(0.05)


def is_alive(pid: int, started: int) -> bool:
    """Whether the process that had this id and began at this tick still runs; ids are used again."""
    return started_at(pid) == started


def started_at(pid: int) -> int | None:
    """The tick of the machine's clock at which a process began, or None where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, which may hold anything; the 22nd is the start.
    return int(text.rpartition(")")[2].split()[19])
