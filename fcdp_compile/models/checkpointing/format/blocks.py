"""Read the files of a checkpoint, and verify each block against its checksum."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.format.disk import new_sum
from fcdp_compile.models.checkpointing.format.record import CheckpointRecord, file_name
from fcdp_compile.models.files.safetensors_file import Stored, stored_tensors


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

    def header(self, file: int) -> Mapping[str, Stored]:
        """Return the tensors of a file, by name."""
        if file not in self._headers:
            size_bytes = self._check_size(file)
            self._headers[file], _ = stored_tensors(
                self.path(file), size_bytes, lambda a, b: bytes(self._bytes(file, a, b))
            )
        return self._headers[file]

    def find(self, file: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Stored:
        """Return the entry of a tensor, which must have the given dtype and shape."""
        stored = self.header(file).get(name)
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
        return _as_tensor(raw, stored.dtype, shape)

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
        checksum = new_sum()
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


def _as_tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not raw:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
