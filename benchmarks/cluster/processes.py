"""Find and end the processes of a network namespace."""

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
    """Return the ids of the running processes in a network namespace."""
    try:
        wanted = (NAMESPACES / namespace).stat()
    except FileNotFoundError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process has just ended
                own = (entry / "ns" / "net").stat()
                if (own.st_dev, own.st_ino) == (wanted.st_dev, wanted.st_ino):
                    found.append(int(entry.name))
    return found


def is_rank(pid: int) -> bool:
    """Whether torchrun has started this process as a rank: then it has LOCAL_RANK in its environment."""
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
    """End the namespaces' processes by SIGTERM, and by SIGKILL if they still run after `patience_s`."""
    names = list(namespaces)

    def left() -> set[int]:
        return {pid for name in names for pid in processes_of(name)}

    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + patience_s
        told: set[int] = set()
        while (pids := left()) and time.monotonic() < until:
            send(number, pids - told)
            send(signal.SIGCONT, pids - told)  # a stopped process handles SIGTERM only when it runs
            told |= pids
            time.sleep(0.05)


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with this id and start tick still runs; the tick matters, as ids are used again."""
    return started_at(pid) == started


def started_at(pid: int) -> int | None:
    """Return the clock tick at which a process began, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the command in parentheses, which may contain spaces; the 22nd is the start.
    return int(text.rpartition(")")[2].split()[19])
