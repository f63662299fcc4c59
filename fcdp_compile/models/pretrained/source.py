"""Where a parameter's values come from; any part of a source can be read without the rest.

A source is a tensor in a file, or others stacked, joined, cut or transposed, without arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import safe_open
from torch import Tensor

from fcdp_compile.core.params.layout import Box
from fcdp_compile.core.params.packing import block_of
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.files.safetensors_header import Stored

_REOPEN_BYTES = 2**28


class Source(Protocol):
    """A tensor that can be read in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The source's shape."""

    @property
    def leaves(self) -> Iterator[Stored]:
        """The tensors in files that the source is made of."""

    def fill(self, out: Tensor, at: Sequence[int], files: Files) -> None:
        """Fill `out` with the part of the tensor that begins at indices `at`, cast to out's dtype."""


class Files:
    """The files that are being read; counts the bytes that were copied.

    safetensors maps a file into memory, and every page that was read counts as the process's own until the
    file is closed.  So all files are closed after every `_REOPEN_BYTES`, and opened again when needed.
    """

    def __init__(self) -> None:
        self.read_bytes = 0
        self._open: dict[Path, Any] = {}
        self._read_since_bytes = 0

    def copy(self, stored: Stored, part: tuple[slice, ...], out: Tensor) -> None:
        """Copy a part of a tensor in a file."""
        if not out.numel():
            return
        values = self._file(stored.file).get_slice(stored.name)[part if part else ...]
        if tuple(values.shape) != tuple(out.shape) or values.dtype != stored.dtype:
            raise CheckpointError(f"{stored.file} changed while {stored.name!r} was read")
        out.copy_(values)
        self.read_bytes += values.nbytes
        self._read_since_bytes += values.nbytes

    def _file(self, path: Path) -> Any:
        if self._read_since_bytes > _REOPEN_BYTES:
            self.close()
        if path not in self._open:
            opened: Any = safe_open(path, framework="pt")
            self._open[path] = opened.__enter__()
        return self._open[path]

    def close(self) -> None:
        """Close every file."""
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()
        self._read_since_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()


def fill_boxes(part: Tensor, boxes: Sequence[Box], source: Source, files: Files) -> None:
    """Fill a part of a source, which consists of these blocks, cast to the part's dtype."""
    for box in boxes:
        source.fill(block_of(part, box.inside, box.shape), box.at, files)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor in a file."""

    stored: Stored

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.stored.shape

    @property
    def leaves(self) -> Iterator[Stored]:
        """The tensor itself."""
        yield self.stored

    def fill(self, out: Tensor, at: Sequence[int], files: Files) -> None:
        """Read the part from the file."""
        part = tuple(slice(a, a + n) for a, n in zip(at, out.shape, strict=True))
        files.copy(self.stored, part, out)


@dataclass(frozen=True, slots=True)
class Known:
    """Values that were read already, from a tensor in a file."""

    stored: Stored
    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The values' shape."""
        return tuple(self.values.shape)

    @property
    def leaves(self) -> Iterator[Stored]:
        """The tensor in a file."""
        yield self.stored

    def fill(self, out: Tensor, at: Sequence[int], files: Files) -> None:
        """Copy the part."""
        out.copy_(self.values[tuple(slice(a, a + n) for a, n in zip(at, out.shape, strict=True))])


@dataclass(frozen=True, slots=True)
class BytesOf:
    """The bytes of a tensor in a file, as uint8 of another shape; parts are whole rows of it."""

    stored: Stored
    shape: tuple[int, ...]

    @property
    def leaves(self) -> Iterator[Stored]:
        """The tensor in a file."""
        yield self.stored

    def fill(self, out: Tensor, at: Sequence[int], files: Files) -> None:
        """Read the rows of the file's tensor that the part is in, and take the part."""
        row_bytes = math.prod(self.shape[1:])
        their_bytes = math.prod(self.stored.shape[1:]) * self.stored.dtype.itemsize
        begin, end = at[0] * row_bytes, (at[0] + len(out)) * row_bytes
        first, last = begin // their_bytes, -(-end // their_bytes)
        shape = (last - first, *self.stored.shape[1:])
        rows = torch.empty(shape, dtype=self.stored.dtype, device="cpu")
        files.copy(self.stored, (slice(first, last), *(slice(None) for _ in shape[1:])), rows)
        mine = slice(begin - first * their_bytes, end - first * their_bytes)
        out.copy_(rows.view(-1).view(torch.uint8)[mine].view(out.shape))


@dataclass(frozen=True, slots=True)
class Joined:
    """Sources in a row along a dimension, equal in all others."""

    parts: tuple[Source, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The first source's shape, with the rows of all sources along `dim`."""
        rows = sum(part.shape[self.dim] for part in self.parts)
        return _replaced(self.parts[0].shape, self.dim, rows)

    @property
    def leaves(self) -> Iterator[Stored]:
        """The leaves of all parts."""
        for part in self.parts:
            yield from part.leaves

    def fill(self, out: Tensor, at: Sequence[int], files: Files) -> None:
        """Fill from each part its share of the rows."""
        begin, end, start = at[self.dim], at[self.dim] + out.shape[self.dim], 0
        for part in self.parts:
            stop = start + part.shape[self.dim]
            first, last = max(begin, start), min(end, stop)
            if first < last:
                rows = out.narrow(self.dim, first - begin, last - first)
                part.fill(rows, _replaced(at, self.dim, first - start), files)
            start = stop


@dataclass(frozen=True, slots=True)
class Stacked:
    """Sources of one shape, stacked along a new dimension."""

    parts: tuple[Source, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The parts' shape, with their number at `dim`."""
        one = self.parts[0].shape
        return (*one[: self.dim], len(self.parts), *one[self.dim :])

    @property
    def leaves(self) -> Iterator[Stored]:
        """The leaves of all parts."""
        for part in self.parts:
            yield from part.leaves

    def fill(self, out: Tensor, at: Sequence[int], files: Files) -> None:
        """Fill each slice from its part."""
        inside = (*at[: self.dim], *at[self.dim + 1 :])
        for i in range(out.shape[self.dim]):
            self.parts[at[self.dim] + i].fill(out.select(self.dim, i), inside, files)


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a source along a dimension."""

    whole: Source
    dim: int
    start: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole source's shape, with fewer rows."""
        return _replaced(self.whole.shape, self.dim, self.rows)

    @property
    def leaves(self) -> Iterator[Stored]:
        """The leaves of the whole source."""
        return self.whole.leaves

    def fill(self, out: Tensor, at: Sequence[int], files: Files) -> None:
        """Fill from the whole source, at shifted indices."""
        self.whole.fill(out, _replaced(at, self.dim, at[self.dim] + self.start), files)


@dataclass(frozen=True, slots=True)
class Transposed:
    """A source with two dimensions exchanged."""

    of: Source
    dim0: int
    dim1: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape with the two dimensions exchanged."""
        return self._exchanged(self.of.shape)

    @property
    def leaves(self) -> Iterator[Stored]:
        """The leaves of the other source."""
        return self.of.leaves

    def fill(self, out: Tensor, at: Sequence[int], files: Files) -> None:
        """Fill a transposed view."""
        self.of.fill(out.transpose(self.dim0, self.dim1), self._exchanged(at), files)

    def _exchanged(self, sizes: Sequence[int]) -> tuple[int, ...]:
        found = list(sizes)
        found[self.dim0], found[self.dim1] = found[self.dim1], found[self.dim0]
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Rearranged:
    """A source whose elements a function puts in another order, for which it needs the whole tensor.

    shape: of the function's result.
    """

    of: Source
    function: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    @property
    def leaves(self) -> Iterator[Stored]:
        """The leaves of the other source."""
        return self.of.leaves

    def fill(self, out: Tensor, at: Sequence[int], files: Files) -> None:
        """Read the whole source, rearrange it, and take the part."""
        whole = torch.empty(self.of.shape, dtype=out.dtype, device="cpu")
        self.of.fill(whole, (0,) * whole.ndim, files)
        part = tuple(slice(a, a + n) for a, n in zip(at, out.shape, strict=True))
        out.copy_(self.function(whole)[part])


def _replaced(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])
