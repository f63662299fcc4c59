"""A job's folder in the memory of a node, which outlives the job's processes but not the machine.

    /dev/shm/fcdp-<user>-<job>/node-<k>/    k: number of the node among those of one machine, 0 for most

FCDP_NODE_MEMORY names another folder than /dev/shm.  The job's processes hold a shared lock on the folder, so
that `fcdp clean` can tell a running job's memory from what a job has left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fcdp_compile.errors import ArgumentError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_LOCK = "lock"


def job_name(given: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The job's name in names of folders: the given id, or torchrun's, or SLURM's.

    Raises: ArgumentError if there is none, or if torchrun's is its default, which all jobs share.
    """
    if given is not None and not (isinstance(given, str) and given):
        raise ArgumentError(f"job must be a text that names this job, not {given!r}")
    by_torchrun = environment.get("TORCHELASTIC_RUN_ID", "none")
    found = given or ("" if by_torchrun == "none" else by_torchrun)
    found = found or environment.get("SLURM_JOB_ID", "")
    if not found:
        raise ArgumentError(
            "the job has no id by which its memory could be found after a restart; give torchrun "
            "--rdzv-id=…, another one for each job, or give survive job=…"
        )
    if _NAME.fullmatch(found) and not found.startswith("."):
        return found
    return hashlib.sha256(found.encode()).hexdigest()[:16]


def memory_root(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder in memory that holds the folders of all jobs.

    Raises: ArgumentError if it is no folder.
    """
    root = Path(environment.get("FCDP_NODE_MEMORY", "/dev/shm"))
    if not root.is_dir():
        raise ArgumentError(
            f"{root} is no folder; let FCDP_NODE_MEMORY name one that is in memory (a tmpfs)"
        )
    return root.resolve()


def machine_mark(root: Path) -> str:
    """Equal for two processes if they see the same memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else os.uname().nodename
    found = root.stat()
    return f"{machine} {found.st_dev} {found.st_ino}"


def _job_folder(root: Path, job: str) -> Path:
    return root / f"fcdp-{os.getuid()}-{job}"


class NodeMemory:
    """The folder of one node of a job, held by this process until `release`."""

    def __init__(self, root: Path, job: str, node: int) -> None:
        self.job = job
        self.folder = _job_folder(root, job) / f"node-{node}"
        self._lock: weakref.finalize[[int], NodeMemory] | None = None

    def hold(self) -> None:
        """Make the folder if it is not there, and hold its lock together with other processes of the job.

        Raises: OSError.
        """
        while True:
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _is_there(self.folder / _LOCK, lock):
                self._lock = weakref.finalize(self, os.close, lock)
                return
            os.close(lock)  # another process has removed the folder meanwhile

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock()
            self._lock = None

    def remove(self) -> None:
        """Remove the job's memory on this machine, but for what other processes hold."""
        self.release()
        _remove_free(self.folder.parent)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftMemory:
    """Memory of a job on this machine.

    size_bytes: of its files.  age_s: seconds since it was last written to.  is_used: whether a process of the
    job lives.
    """

    job: str
    folder: Path
    size_bytes: int
    age_s: float
    is_used: bool


def memories(root: Path) -> list[LeftMemory]:
    """The memory of all jobs of this user, by name."""
    prefix, found = f"fcdp-{os.getuid()}-", []
    for folder in sorted(root.glob(f"{prefix}*")):
        if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
            continue
        stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
        written_s = max((s.st_mtime for s in stats), default=folder.stat().st_mtime)
        found.append(
            LeftMemory(
                job=folder.name.removeprefix(prefix),
                folder=folder,
                size_bytes=sum(s.st_size for s in stats),
                age_s=max(0.0, time.time() - written_s),
                is_used=not all(map(_is_free, _locks(folder))),
            )
        )
    return found


def remove_memory(memory: LeftMemory) -> bool:
    """Remove the memory of a job, unless one of its processes lives; return whether it is gone."""
    _remove_free(memory.folder)
    return not memory.folder.exists()


def _remove_free(folder: Path) -> None:
    """Remove the folders of nodes that no process holds; several processes may do so at a time."""
    for path in list(_locks(folder)):
        if _is_free(path):
            shutil.rmtree(path.parent, ignore_errors=True)
    with contextlib.suppress(OSError):  # it is not empty, or gone
        folder.rmdir()


def _locks(folder: Path) -> Iterator[Path]:
    return folder.glob(f"node-*/{_LOCK}")


def _is_free(path: Path) -> bool:
    """Whether no process holds a lock, or the lock is gone."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
