"""Where a parameter's values come from; any part of a source can be read without the rest.

A source is a tensor in a file, or others stacked, joined, cut or transposed, without arithmetic.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fcdp_compile.core.params.layout import Box
from fcdp_compile.core.params.packing import block_of
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.files.safetensors_file import Stored

_REOPEN_BYTES = 2**28


class Files(ExitStack):
    """The files that are being read; counts the bytes that were copied.

    safetensors maps a file into memory, and every page that was read counts as the process's own until the
    file is closed.  So all files are closed after every `_REOPEN_BYTES`, and opened again when needed.
    """

    def __init__(self) -> None:
        super().__init__()
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
            self._read_since_bytes = 0
        if path not in self._open:
            opened: Any = safe_open(path, framework="pt")
            self._open[path] = self.enter_context(opened)
            self.callback(self._open.pop, path)
        return self._open[path]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A tensor that can be read in parts.

    leaves: the tensors in files that it is made of.
    fill: fills a tensor with the part of the source that begins at given indices, cast to the tensor's dtype.
    is_leaf: whether the source is a tensor in a file, as it is there.
    """

    shape: tuple[int, ...]
    leaves: tuple[Stored, ...]
    fill: Callable[[Tensor, Sequence[int], Files], None]
    is_leaf: bool = False

    def fill_boxes(self, part: Tensor, boxes: Sequence[Box], files: Files) -> None:
        """Fill a part of the source, which consists of these blocks, cast to the part's dtype."""
        for box in boxes:
            self.fill(block_of(part, box.inside, box.shape), box.at, files)

    def read(self, files: Files, dtype: torch.dtype) -> Tensor:
        """Read the whole source to host memory."""
        whole = torch.empty(self.shape, dtype=dtype, device="cpu")
        self.fill(whole, (0,) * whole.ndim, files)
        return whole


def in_file(stored: Stored) -> Source:
    """A tensor in a file."""

    def fill(out: Tensor, at: Sequence[int], files: Files) -> None:
        files.copy(stored, _slices(at, out), out)

    return Source(stored.shape, (stored,), fill, is_leaf=True)


def known(stored: Stored, values: Tensor) -> Source:
    """Values that were read already, from a tensor in a file."""

    def fill(out: Tensor, at: Sequence[int], files: Files) -> None:
        out.copy_(values[_slices(at, out)])

    return Source(tuple(values.shape), (stored,), fill)


def bytes_of(stored: Stored, shape: tuple[int, ...]) -> Source:
    """The bytes of a tensor in a file, as uint8 of another shape; parts are whole rows of it."""
    row_bytes = math.prod(shape[1:])
    their_bytes = math.prod(stored.shape[1:]) * stored.dtype.itemsize

    def fill(out: Tensor, at: Sequence[int], files: Files) -> None:
        begin, end = at[0] * row_bytes, (at[0] + len(out)) * row_bytes
        first, last = begin // their_bytes, -(-end // their_bytes)
        rows = torch.empty((last - first, *stored.shape[1:]), dtype=stored.dtype, device="cpu")
        files.copy(stored, _slices((first, *(0 for _ in stored.shape[1:])), rows), rows)
        mine = slice(begin - first * their_bytes, end - first * their_bytes)
        out.copy_(rows.view(-1).view(torch.uint8)[mine].view(out.shape))

    return Source(shape, (stored,), fill)


def joined(parts: Sequence[Source], dim: int) -> Source:
    """Sources in a row along a dimension, equal in all others."""

    def fill(out: Tensor, at: Sequence[int], files: Files) -> None:
        begin, end, start = at[dim], at[dim] + out.shape[dim], 0
        for part in parts:
            stop = start + part.shape[dim]
            first, last = max(begin, start), min(end, stop)
            if first < last:
                rows = out.narrow(dim, first - begin, last - first)
                part.fill(rows, _replaced(at, dim, first - start), files)
            start = stop

    shape = _replaced(parts[0].shape, dim, sum(part.shape[dim] for part in parts))
    return Source(shape, _leaves(parts), fill)


def stacked(parts: Sequence[Source], dim: int) -> Source:
    """Sources of one shape, stacked along a new dimension."""

    def fill(out: Tensor, at: Sequence[int], files: Files) -> None:
        inside = (*at[:dim], *at[dim + 1 :])
        for i in range(out.shape[dim]):
            parts[at[dim] + i].fill(out.select(dim, i), inside, files)

    one = parts[0].shape
    return Source((*one[:dim], len(parts), *one[dim:]), _leaves(parts), fill)


def rows_of(whole: Source, dim: int, start: int, rows: int) -> Source:
    """Some rows of a source along a dimension."""

    def fill(out: Tensor, at: Sequence[int], files: Files) -> None:
        whole.fill(out, _replaced(at, dim, at[dim] + start), files)

    return Source(_replaced(whole.shape, dim, rows), whole.leaves, fill)


def transposed(of: Source, dim0: int, dim1: int) -> Source:
    """A source with two dimensions exchanged."""

    def exchanged(sizes: Sequence[int]) -> tuple[int, ...]:
        found = list(sizes)
        found[dim0], found[dim1] = found[dim1], found[dim0]
        return tuple(found)

    def fill(out: Tensor, at: Sequence[int], files: Files) -> None:
        of.fill(out.transpose(dim0, dim1), exchanged(at), files)

    return Source(exchanged(of.shape), of.leaves, fill)


def rearranged(of: Source, function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Source:
    """A source whose elements a function puts in another order, for which it needs the whole tensor.

    shape: of the function's result.
    """

    def fill(out: Tensor, at: Sequence[int], files: Files) -> None:
        out.copy_(function(of.read(files, out.dtype))[_slices(at, out)])

    return Source(shape, of.leaves, fill)


def _slices(at: Sequence[int], part: Tensor) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(at, part.shape, strict=True))


def _leaves(parts: Sequence[Source]) -> tuple[Stored, ...]:
    return tuple(stored for part in parts for stored in part.leaves)


def _replaced(sizes: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


# --- other ranks' rows ------------------------------------------------------------------------------------

_REMOTE = (
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
)  # fmt: skip
"""File systems whose files may be on another machine; all kinds of fuse count as such."""


class CheckpointRows(Files):
    """Reads other nodes' rows from a checkpoint that was loaded, for `runtime.cache.row_sources`."""

    def __init__(self, sources: Mapping[str, tuple[ParamSpec, Source]]) -> None:
        super().__init__()
        self._sources = sources

    @property
    def keys(self) -> list[str]:
        """The keys of the parameters in the checkpoint."""
        return list(self._sources)

    def read(self, key: str, node: int, place: int) -> Tensor:
        """Read the home shard of the rank at a place of a node."""
        spec, source = self._sources[key]
        shape = spec.layout.local_shape(node, place)
        out = torch.empty(shape, dtype=spec.home_dtype, device="cpu")
        source.fill_boxes(out, spec.boxes(node, place), self)
        return out


def is_local(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether a file is on a disk of this machine; False if the system does not tell.

    Reading rows over a network would not save the traffic of gathering them.

    mounts: the system's list of file systems.
    """
    try:
        mounted = mounts.read_bytes().splitlines()
        place = path.resolve(strict=True)
    except OSError:
        return False
    best, kind = -1, "nfs"
    for line in mounted:
        _, where, of, *_ = line.split(b" ")
        # The list has blanks and similar characters as octal numbers.
        name = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), where)
        point = Path(os.fsdecode(name))
        if len(point.parts) >= best and (point == place or point in place.parents):
            best, kind = len(point.parts), os.fsdecode(of)
    return kind not in _REMOTE and not kind.startswith("fuse.")
