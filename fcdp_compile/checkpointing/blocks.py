"""Read the files of a checkpoint, every block of them proven to be what was written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fcdp_compile.checkpointing.disk import new_sum
from fcdp_compile.checkpointing.record import Checkpoint, DataFile, file_name
from fcdp_compile.errors import CheckpointError
from fcdp_compile.tensor_file import DTYPES

_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_MAX_HEADER_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file: what the header says of it; begin: its first byte in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class DataFiles:
    """The data of one checkpoint; a block is in memory at a time.

    Raises, in every method: CheckpointError, naming the file, for one that is missing, of another size than
    was written, or in which what is read was changed since.
    """

    def __init__(self, folder: Path, record: Checkpoint) -> None:
        self._folder = folder / record.folder
        self._record = record
        self._headers: dict[int, dict[str, Stored]] = {}
        self._held: tuple[int, int] | None = None  # file and block
        self._block = memoryview(bytearray())

    def path(self, file: int) -> Path:
        """Where the file of that rank is."""
        return self._folder / file_name(file)

    def header(self, file: int) -> Mapping[str, Stored]:
        """The tensors of a file."""
        if file not in self._headers:
            size_bytes = self._check_size(file)
            length = int.from_bytes(self._bytes(file, 0, 8), "little") if size_bytes >= 8 else -1
            if not 0 <= length <= min(size_bytes - 8, _MAX_HEADER_BYTES):
                self._fail(file, "says that its header is longer than it is")
            try:
                parsed = json.loads(bytes(self._bytes(file, 8, 8 + length)))
                stored = _stored(parsed, 8 + length, size_bytes)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self._fail(file, "has a header that is not one of safetensors")
            self._headers[file] = stored
        return self._headers[file]

    def find(self, file: int, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Stored:
        """A tensor of that dtype and shape."""
        stored = self.header(file).get(name)
        if stored is None or (stored.dtype, stored.shape) != (dtype, shape):
            self._fail(file, f"has no {name!r} of {dtype} {shape}")
        return stored

    def read(self, file: int, stored: Stored) -> Tensor:
        """A whole tensor, in host memory."""
        return self.read_run(file, stored, 0, stored.shape)

    def read_run(self, file: int, stored: Stored, first: int, shape: tuple[int, ...]) -> Tensor:
        """Consecutive elements from `first` on, of that shape."""
        size = stored.dtype.itemsize
        start = stored.begin + first * size
        raw = self._bytes(file, start, start + math.prod(shape) * size)
        return _as_tensor(raw, stored.dtype, shape)

    def verify(self, runs: Iterable[tuple[int, int, int]], told: Callable[[int], object]) -> None:
        """Read what lies in runs of bytes (file, start, stop), each block once.

        told: the bytes of each block.
        """
        size = self._record.block_bytes
        needed = {
            (file, block)
            for file, start, stop in runs
            for block in range(start // size, -(-stop // size))
        }
        for file in sorted({file for file, _ in needed}):
            self._check_size(file)
        for file, block in sorted(needed):
            told(len(self._read_block(file, block)))

    def _bytes(self, file: int, start: int, stop: int) -> bytearray:
        out = bytearray(stop - start)
        size = self._record.block_bytes
        for block in range(start // size, -(-stop // size) if stop > start else 0):
            whole = self._read_block(file, block)
            begin = block * size
            a, b = max(start, begin), min(stop, begin + len(whole))
            out[a - start : b - start] = whole[a - begin : b - begin]
        return out

    def _read_block(self, file: int, block: int) -> memoryview:
        if self._held == (file, block):
            return self._block
        known: DataFile = self._record.files[file]
        size = self._record.block_bytes
        length = min(size, known.size_bytes - block * size)
        if len(self._block) != length:
            self._block = memoryview(bytearray(length))
        self._held = None
        path = self.path(file)
        try:
            with path.open("rb", buffering=0) as handle:
                got, found = 0, 1
                while got < length and found:
                    found = os.preadv(handle.fileno(), [self._block[got:]], block * size + got)
                    got += found
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        checksum = new_sum()
        checksum.update(self._block)
        if got < length or checksum.hexdigest() != known.blocks[block]:
            self._fail(file, f"is damaged between bytes {block * size} and {block * size + length}")
        self._held = (file, block)
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
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


def _stored(parsed: Any, data: int, size_bytes: int) -> dict[str, Stored]:
    """The entries of a header.

    Raises: ValueError, KeyError, TypeError or AttributeError for what is none, or claims bytes that the file
    has not.
    """
    found = {}
    for name, entry in parsed.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if any(type(n) is not int or n < 0 for n in (start, stop, *shape)):
            raise ValueError(name)
        stored = Stored(dtype=_DTYPE_OF[entry["dtype"]], shape=shape, begin=data + start)
        if stop - start != stored.size_bytes or data + stop > size_bytes:
            raise ValueError(name)
        found[name] = stored
    return found
