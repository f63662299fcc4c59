"""The files of a checkpoint: written in an order that survives being killed, and verified when they are read.

    data-<new>/ and its files, synced -> .checkpoint.json.<…>.tmp, synced -> renamed to checkpoint.json,
    folder synced -> data-<old>/ removed

Until the rename the folder holds the old checkpoint, afterwards the new one.  The next save removes the
remains of a killed save and nothing else: only files and folders with names of this format, and only those
that the checkpoint does not name.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.format.record import (
    BLOCK_BYTES,
    FORMAT,
    RECORD,
    CheckpointRecord,
    DataFile,
    file_name,
    folder_of,
    read_record,
)
from fcdp_compile.models.files.aside import sync, written_aside
from fcdp_compile.models.files.json_records import MAX_FILE_BYTES
from fcdp_compile.models.files.safetensors_file import Stored, stored_tensors, write_tensors

log = logging.getLogger(__name__)

_DATA_FOLDER = re.compile(r"data-[0-9a-f]{16}")
_DATA_FILE = re.compile(r"rank-[0-9]{5,}\.safetensors")
_ASIDE = re.compile(r"\.checkpoint\.json\.[0-9a-f]{8}\.tmp")


class BlockSums:
    """Computes the checksums of a file's blocks while its pieces are written.

    SHA-256 has instructions in processors: 1.5 GB/s, and BLAKE2b 0.45 (one core of a Xeon, hashlib).
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._done: list[str] = []
        self._block = hashlib.sha256()

    def add(self, piece: memoryview) -> None:
        """Take the next bytes of the file."""
        while piece:
            part = piece[: BLOCK_BYTES - self.size_bytes % BLOCK_BYTES]
            self._block.update(part)
            self.size_bytes += len(part)
            if self.size_bytes % BLOCK_BYTES == 0:
                self._end_block()
            piece = piece[len(part) :]

    def file(self) -> DataFile:
        """Return the file's entry in the record, once all bytes were added."""
        if self.size_bytes % BLOCK_BYTES:
            self._end_block()
        return DataFile(size_bytes=self.size_bytes, blocks=tuple(self._done))

    def _end_block(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block = hashlib.sha256()


class Disk:
    """The steps of a save on files that all ranks share; tests override `reached` to watch each step."""

    def reached(self, point: str) -> None:
        """Do nothing; called after or before each step."""

    def leads(self, topology: Topology) -> bool:
        """Whether this rank makes, records and removes checkpoints: one rank for each copy of the folder."""
        return topology.number == 0

    def spread(
        self,
        folder: Path,
        files: Sequence[DataFile],
        topology: Topology,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Bring the files of ranks, all written, to where they are kept; all ranks of the group call it."""

    def make_folders(self, folder: Path, id: str) -> None:
        """Make a checkpoint's folder, its parents, and the folder of its data."""
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self.reached("made folder")
        if is_new:
            self.sync_folder(folder.parent)
        (folder / folder_of(id)).mkdir()
        self.reached("made data folder")
        self.sync_folder(folder)

    def write_data(
        self, folder: Path, rank: int, tensors: Mapping[str, Tensor], wrote: Callable[[int], object]
    ) -> DataFile:
        """Write a rank's file to a data's folder; wrote: called with the bytes of each piece of tensors."""
        sums = BlockSums()

        def note(piece: memoryview) -> None:
            self.reached("wrote data")
            if sums.size_bytes:  # not the header
                wrote(len(piece))
            sums.add(piece)

        write_tensors(folder / file_name(rank), tensors, wrote=note)
        self.reached("synced data")
        self.sync_folder(folder)
        return sums.file()

    def sync_folder(self, folder: Path) -> None:
        """Sync a folder, so that the names in it survive a crash of the machine."""
        sync(folder)
        self.reached("synced folder")

    def put_record(self, folder: Path, record: CheckpointRecord) -> None:
        """Make a checkpoint, whose files are on the disk, the folder's checkpoint.

        Raises: CheckpointError for a record too large to be read; OSError if it cannot be written.
        """
        text = FORMAT.to_json(record).encode()
        if len(text) > MAX_FILE_BYTES:
            raise CheckpointError(
                f"{RECORD} would have {len(text)} bytes and may have {MAX_FILE_BYTES}; give long lists of "
                "numbers in extra=… as tensors"
            )
        with written_aside(folder / RECORD) as aside:
            with aside.open("xb") as file:
                self.reached("opened record")
                file.write(text)
                file.flush()
                self.reached("wrote record")
                os.fsync(file.fileno())
            self.reached("synced record")
        self.reached("renamed record")
        self.sync_folder(folder)

    def sweep(self, folder: Path, *, new: str = "") -> None:
        """Remove the remains of killed saves, and data that the checkpoint does not name.

        new: the data's folder of a checkpoint that is being written.
        If the record cannot be read, nothing is removed, because the record may name any of the folders.
        """
        try:
            kept = {new, _named(folder)}
            for entry in sorted(folder.iterdir()):
                if _ASIDE.fullmatch(entry.name):
                    entry.unlink()
                    self.reached("removed record")
                elif _DATA_FOLDER.fullmatch(entry.name) and entry.name not in kept:
                    self._remove_data(entry)
        except (OSError, CheckpointError) as error:
            log.warning("data of earlier checkpoints in %s cannot be removed: %s", folder, error)

    def take_back(self, folder: Path, id: str) -> None:
        """Remove the data of a save that has failed, unless the record already names it."""
        try:
            if _named(folder) != folder_of(id):
                self._remove_data(folder / folder_of(id))
        except (OSError, CheckpointError) as error:
            log.warning("data of a failed save in %s cannot be removed: %s", folder, error)

    def _remove_data(self, folder: Path) -> None:
        if folder.is_symlink() or not folder.is_dir():
            return
        for entry in sorted(folder.iterdir()):
            if _DATA_FILE.fullmatch(entry.name):
                entry.unlink()
                self.reached("removed data")
        if not any(folder.iterdir()):
            folder.rmdir()
            self.reached("removed data folder")


def _named(folder: Path) -> str | None:
    """Return the data's folder that the record names; None if there is no record."""
    return read_record(folder).folder if (folder / RECORD).exists() else None


# --- reading ----------------------------------------------------------------------------------------------


class FileBlock(NamedTuple):
    """One block of a rank's file."""

    file: int
    number: int


class DataFiles:
    """The data of one checkpoint; one block is in memory at a time.

    Raises, in every method: CheckpointError, naming the file, if it is missing, has another size than was
    written, or the bytes that are read have changed since.
    """

    def __init__(self, folder: Path, record: CheckpointRecord) -> None:
        self._folder = folder / record.folder
        self._record = record
        self._headers: dict[int, dict[str, Stored]] = {}
        self._held: FileBlock | None = None
        self._block = memoryview(bytearray())

    def path(self, file: int) -> Path:
        """The path of a rank's file."""
        return self._folder / file_name(file)

    def find(self, file: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Stored:
        """Return the entry of a tensor, which must have the given dtype and shape."""
        if file not in self._headers:
            size_bytes = self._check_size(file)
            self._headers[file], _ = stored_tensors(
                self.path(file), size_bytes, lambda a, b: bytes(self._bytes(file, a, b))
            )
        stored = self._headers[file].get(name)
        if stored is None or (stored.dtype, stored.shape) != (dtype, shape):
            self._fail(file, f"has no {name!r} of {dtype} {shape}")
        return stored

    def read(self, file: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Read a whole tensor into host memory; it must have the given dtype and shape."""
        return self.read_run(file, self.find(file, name, dtype, shape), 0, shape)

    def read_run(self, file: int, stored: Stored, first: int, shape: tuple[int, ...]) -> Tensor:
        """Read consecutive elements, from `first` on, as a tensor of the given shape."""
        size = stored.dtype.itemsize
        start = stored.start + first * size
        raw = self._bytes(file, start, start + math.prod(shape) * size)
        if not raw:
            return torch.empty(shape, dtype=stored.dtype, device="cpu")
        return torch.frombuffer(raw, dtype=torch.uint8).view(stored.dtype).reshape(shape)

    def blocks(self, runs: Iterable[tuple[int, int, int]]) -> list[FileBlock]:
        """Return the blocks that contain runs of bytes (file, start, stop), in file order, none twice."""
        size = self._record.block_bytes
        needed = {
            (file, number)
            for file, start, stop in runs
            for number in range(start // size, -(-stop // size))
        }
        return [FileBlock(file, number) for file, number in sorted(needed)]

    def size_of(self, block: FileBlock) -> int:
        """Bytes of a block; the last of a file may be shorter."""
        size = self._record.block_bytes
        return min(size, self._record.files[block.file].size_bytes - block.number * size)

    def verify(self, blocks: Sequence[FileBlock], told: Callable[[int], object]) -> None:
        """Read and verify blocks; told: called with the bytes of each."""
        for file in dict.fromkeys(block.file for block in blocks):
            self._check_size(file)
        for block in blocks:
            told(len(self._read_block(block)))

    def _bytes(self, file: int, start: int, stop: int) -> bytearray:
        out = bytearray(stop - start)
        size = self._record.block_bytes
        for block in self.blocks([(file, start, stop)]):
            whole = self._read_block(block)
            begin = block.number * size
            a, b = max(start, begin), min(stop, begin + len(whole))
            out[a - start : b - start] = whole[a - begin : b - begin]
        return out

    def _read_block(self, block: FileBlock) -> memoryview:
        if self._held == block:
            return self._block
        file, length = block.file, self.size_of(block)
        start = block.number * self._record.block_bytes
        if len(self._block) != length:
            self._block = memoryview(bytearray(length))
        self._held = None
        path = self.path(file)
        try:
            with path.open("rb", buffering=0) as handle:
                got, found = 0, 1
                while got < length and found:
                    found = os.preadv(handle.fileno(), [self._block[got:]], start + got)
                    got += found
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        checksum = hashlib.sha256()
        checksum.update(self._block)
        if got < length or checksum.hexdigest() != self._record.files[file].blocks[block.number]:
            self._fail(file, f"is damaged between bytes {start} and {start + length}")
        self._held = block
        return self._block

    def _check_size(self, file: int) -> int:
        expected = self._record.files[file].size_bytes
        try:
            found = self.path(file).stat().st_size
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path(file)}: {error.strerror}") from error
        if found != expected:
            self._fail(file, f"has {found} bytes, but {expected} were written")
        return expected

    def _fail(self, file: int, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path(file)} {problem}; load another checkpoint")
