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

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_LOCK = "lock"
_OWNER = "owner"
_WAIT_S = 20.0
"""How long the processes of an earlier start may take to end."""


def job_name(given: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The job's name in names of folders: of the given id, of torchrun's, or of SLURM's.

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
    if _NAME.fullmatch(found):
        return found
    readable = re.sub(r"[^A-Za-z0-9_-]", "_", found)[:40]
    return f"{readable}-{hashlib.sha256(found.encode()).hexdigest()[:8]}"


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
    """The folder of one node of a job, held by this process until `release` or until the object dies."""

    def __init__(self, root: Path, job: str, node: int) -> None:
        self.job = job
        self.folder = _job_folder(root, job) / f"node-{node}"
        self._locks: list[_Lock] = []

    def hold(self, *, owns: bool) -> None:
        """Make the folder if it is not there, and hold it together with other processes of the node.

        owns: whether this is the process of the node that no other start of the job may have.  It waits for
        processes of an earlier start to end.

        Raises: ArgumentError if the folder is another user's, or if another start of the job lives; OSError.
        """
        self._locks.append(self._locked(_LOCK, fcntl.LOCK_SH))
        until_s = time.monotonic() + _WAIT_S
        while owns and len(self._locks) < 2:
            try:
                self._locks.append(self._locked(_OWNER, fcntl.LOCK_EX | fcntl.LOCK_NB))
            except BlockingIOError:
                if time.monotonic() > until_s:
                    self.release()
                    raise ArgumentError(
                        f"another process uses {self.folder}, the memory of job {self.job!r}: another start "
                        "of the job, or another model of it; give each of them a job=… of its own"
                    ) from None
                time.sleep(0.1)

    def _locked(self, name: str, how: int) -> _Lock:
        while True:
            try:
                for folder in (self.folder.parent, self.folder):
                    folder.mkdir(mode=0o700, exist_ok=True)
                    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                        raise ArgumentError(f"{folder} is not this user's; give the job another id")
                lock = _Lock(self.folder / name, how)
            except (FileExistsError, FileNotFoundError):
                continue  # another process removes the folder
            if lock.is_there:
                return lock

    def release(self) -> None:
        """Give the folder back."""
        while self._locks:
            self._locks.pop().release()

    def remove(self) -> None:
        """Remove the job's memory on this machine, but for what other processes hold."""
        self.release()
        _remove_free(self.folder.parent)


class _Lock:
    """A lock on a file; forked processes inherit it, but `release` ends it for them, too."""

    def __init__(self, path: Path, how: int) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, how)
        except BaseException:
            os.close(self._file)
            raise
        self.release = weakref.finalize(self, _unlock, self._file)

    @property
    def is_there(self) -> bool:
        """Whether the file has not been removed since."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file))
        except FileNotFoundError:
            return False


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)


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
        stats = list(_stats(folder))
        found.append(
            LeftMemory(
                job=folder.name.removeprefix(prefix),
                folder=folder,
                size_bytes=sum(s.st_size for s in stats),
                age_s=max(0.0, time.time() - max((s.st_mtime for s in stats), default=0.0)),
                is_used=any(_free(node) is None for node in folder.glob("node-*")),
            )
        )
    return found


def _stats(folder: Path) -> Iterator[os.stat_result]:
    """Of the files in a folder, some of which may go meanwhile."""
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            yield path.stat()


def remove_memory(memory: LeftMemory) -> bool:
    """Remove the memory of a job, unless one of its processes lives; return whether it is gone."""
    _remove_free(memory.folder)
    return not memory.folder.exists()


def _remove_free(folder: Path) -> None:
    """Remove the folders of nodes that no process holds; several processes may do so at a time."""
    for node in list(folder.glob("node-*")):
        if (lock := _free(node)) is not None:
            shutil.rmtree(node, ignore_errors=True)
            lock.release()  # who has waited for it sees that the folder is gone
    with contextlib.suppress(OSError):  # it is not empty, or gone
        folder.rmdir()


def _free(node: Path) -> _Lock | None:
    """Lock the folder of a node that no process holds; None if one does, or if it is gone."""
    try:
        return _Lock(node / _LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return None
