"""checkpoint.json: which files a checkpoint has, what they hold, and how to tell that they are intact.

Each row of a parameter is written once, even if several ranks have a copy.

A file stores some blocks of a tensor (`core.params.layout.Box`), packed as one smaller tensor.  A rank needs
other blocks.

    file  rows 4:8, all columns      want  rows 6:12, all columns  ->  rows 6:8: one run of bytes
    file  rows 4:8, all columns      want  columns 0:3, all rows   ->  rows 4:8, of which columns 0:3 are kept
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fcdp_compile.core.params.layout import Box, ParamLayout, Span, Within, boxes
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import Home
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.files.json_records import LATER, RecordFormat, fail
from fcdp_compile.models.files.safetensors_file import DTYPES
from fcdp_compile.strategy import Scope

RECORD = "checkpoint.json"
BLOCK_BYTES = 2**22
"""Bytes under one checksum: 4 TB of data then have 68 MB of checksums."""
_CHECKSUM = re.compile(r'"checksum": "([0-9a-f]{64})"')
ID = re.compile(r"[0-9a-f]{16}")
TORCH_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One rank's file: its size, and the checksum of each of its blocks."""

    size_bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOf:
    """Where a tensor is in a whole tensor of the given shape, which a "tp" group cuts along dim.

    first: the first row of each run of rows.  rows: of each run.
    """

    shape: tuple[int, ...]
    dim: int
    first: tuple[int, ...]
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTensor:
    """A tensor whose parts were written by ranks.

    dtype: torch's name of it.  dim: the dimension that is cut; None if one file has the whole tensor.
    rows, files: for each part, in the order along dim, its number of rows and the rank whose file has it.
    part_of: the whole tensor, if this tensor is only a part that one rank of each "tp" group had; all parts
    have the same name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    dim: int | None
    rows: tuple[int, ...]
    files: tuple[int, ...]
    part_of: PartOf | None = field(default=None, metadata=LATER)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.shape if self.part_of is None else self.part_of.shape

    @property
    def held(self) -> Iterator[tuple[int, tuple[int, ...], list[Box]]]:
        """Each file that has rows, the shape of the tensor in it, and where in the whole tensor they are."""
        part, within, first = self.part_of, None, 0
        if part is not None:
            within = Within(part.dim, tuple(Span(at, part.rows) for at in part.first))
        for count, file in zip(self.rows, self.files, strict=True):
            shape = tuple(count if i == self.dim else size for i, size in enumerate(self.shape))
            yield file, shape, boxes(self.shape, self.dim, Span(first, count), within)
            first += count


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A frozen parameter whose values are not in the checkpoint.

    mark: the mark of its values (see `contents.mark_of`).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    mark: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedValue:
    """A value (`tree`), with its tensors in one file.

    rank: the rank that has the value, and whose file has its tensors; None: all ranks have this value, and
    its tensors are in rank 0's file.
    """

    name: str
    rank: int | None
    tree: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """The record of a checkpoint.

    checksum: the checksum of all other fields.  id: the id of the data's folder.  files: one for each rank,
    by (node * g + place) * t + number in the "tp" group.  tp: t, the ranks of such a group.
    """

    checksum: str
    id: str
    nodes: int
    ranks_per_node: int
    block_bytes: int
    files: tuple[DataFile, ...]
    tensors: tuple[CutTensor, ...]
    left_out: tuple[LeftOut, ...]
    values: tuple[SavedValue, ...]
    tp: int = field(default=1, metadata=LATER)

    @property
    def layout(self) -> tuple[int, int, int]:
        """N, g and t of the ranks that have saved."""
        return self.nodes, self.ranks_per_node, self.tp

    @property
    def folder(self) -> str:
        """The name of the data's folder."""
        return folder_of(self.id)


def folder_of(id: str) -> str:
    """The name of the folder of a checkpoint's data."""
    return f"data-{id}"


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05}.safetensors"


def seal(record: CheckpointRecord) -> CheckpointRecord:
    """Return the record with its checksum."""
    text = FORMAT.to_json(replace(record, checksum=""))
    return replace(record, checksum=hashlib.sha256(text.encode()).hexdigest())


def read_record(folder: Path) -> CheckpointRecord:
    """Return the record of the checkpoint in a folder.

    Raises: CheckpointError, naming the file, if there is none or it is damaged.
    """
    path = folder / RECORD
    try:
        return FORMAT.read(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {RECORD}, so there is no checkpoint in it; give the folder that "
            "fcdp_compile.save was given"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _check_text(text: str) -> None:
    """Compare the checksum in a text with the checksum of the rest of the text, as it was written."""
    found = _CHECKSUM.search(text)
    if found is None:
        fail("checksum", "is missing, or not 64 hexadecimal digits")
    rest = text[: found.start(1)] + text[found.end(1) :]
    if hashlib.sha256(rest.encode()).hexdigest() != found[1]:
        fail("checksum", "does not match the rest of the file, so the file is damaged")


def _check(record: CheckpointRecord) -> None:
    if not ID.fullmatch(record.id):
        fail("id", "is not 16 hexadecimal digits")
    ranks = record.nodes * record.ranks_per_node * record.tp
    if len(record.files) != ranks or not ranks:
        fail("files", f"are {len(record.files)}, but {ranks} ranks have written")
    if record.block_bytes < 1:
        fail("block_bytes", "is 0")
    for i, file in enumerate(record.files):
        if len(file.blocks) != -(-file.size_bytes // record.block_bytes):
            fail(f"files[{i}].blocks", f"are {len(file.blocks)}, not as many as the file has")
    for i, tensor in enumerate(record.tensors):
        _check_tensor(tensor, ranks, f"tensors[{i}]")
    for i, frozen in enumerate(record.left_out):
        if frozen.dtype not in TORCH_DTYPES:
            fail(f"left_out[{i}].dtype", f"is {frozen.dtype!r}, which no parameter has")
    by_name: dict[str, list[CutTensor]] = {}
    for tensor in record.tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    names = Counter([*by_name, *(t.name for t in record.left_out)])
    repeated = [name for name, parts in by_name.items() if not _are_one(parts)]
    if repeated := [*repeated, *(n for n, k in names.items() if k > 1)]:
        fail("tensors", f"has {repeated[0]!r} twice, or not each of its rows once")
    _check_values(record.values, ranks)


def _check_tensor(tensor: CutTensor, ranks: int, path: str) -> None:
    if tensor.dtype not in TORCH_DTYPES:
        fail(f"{path}.dtype", f"is {tensor.dtype!r}, which no file holds")
    if len(tensor.rows) != len(tensor.files) or any(f >= ranks for f in tensor.files):
        fail(f"{path}.files", "do not name one file of the checkpoint for each part")
    if len(set(tensor.files)) < len(tensor.files):
        fail(f"{path}.files", "have two parts in one file")
    is_whole = tensor.dim is None and tensor.rows == (1,)
    is_cut = tensor.dim is not None and tensor.dim < len(tensor.shape)
    if not is_whole and not (is_cut and sum(tensor.rows) == tensor.shape[tensor.dim or 0]):
        fail(f"{path}.rows", "do not match the shape")


def _are_one(tensors: list[CutTensor]) -> bool:
    """Whether tensors of one name are all parts of one tensor, each row once."""
    parts = [(tensor, tensor.part_of) for tensor in tensors if tensor.part_of is not None]
    if not parts:
        return len(tensors) == 1
    files = [file for tensor in tensors for file in tensor.files]
    whole = {(tensor.dtype, part.shape, part.dim) for tensor, part in parts}
    if len(parts) < len(tensors) or len(set(files)) < len(files) or len(whole) > 1:
        return False
    ((_, shape, dim),) = whole
    fitting = [(*shape[:dim], len(p.first) * p.rows, *shape[dim + 1 :]) for _, p in parts]
    if dim >= len(shape) or fitting != [tensor.shape for tensor, _ in parts]:
        return False
    end = 0
    for first, rows in sorted((first, part.rows) for _, part in parts for first in part.first):
        if first != end:
            return False
        end += rows
    return end == shape[dim]


def _check_values(values: tuple[SavedValue, ...], ranks: int) -> None:
    seen: dict[str, list[int | None]] = {}
    for value in values:
        seen.setdefault(value.name, []).append(value.rank)
    for name, whose in seen.items():
        if whose != [None] and whose != list(range(ranks)):
            fail("values", f"has {name!r} neither once for all ranks nor once for each rank")


FORMAT = RecordFormat(
    record=CheckpointRecord,
    schema="fcdp-checkpoint/1",
    what="checkpoint",
    remedy="load another checkpoint",
    error=CheckpointError,
    check=_check,
    check_text=_check_text,
)


# --- which rank writes which rows, and which bytes of a file a rank needs: arithmetic only ----------------

SLAB_BYTES = 2**24
"""Bytes of a file that are read at once, unless one row of its tensor's first dimension is larger."""


def cut(
    name: str, dtype: str, spec: ParamSpec, mesh: Home, sharers: int, number: int
) -> tuple[CutTensor, ...]:
    """Return how the home shards of a parameter, or of a tensor that is cut like them, are written.

    If all nodes or all ranks have a copy, one of them writes it.  Ranks without rows are left out.

    mesh: N and g.  sharers: t, how many ranks share each parameter ("tp"); if they cut it, each part is a
    tensor of its own.  number: the tensor's number among all tensors; it selects the writer, so that each
    node or rank writes some tensors.
    """
    is_cut = spec.inner is not None and spec.inner.dim is not None
    found = []
    for index in range(sharers) if is_cut else [number % sharers]:
        layout = spec.part_layout(index)
        dim, rows, owners = _owned(layout, spec.strategy.home, mesh, number)
        parts = [(count, owner) for count, owner in zip(rows, owners, strict=True) if count]
        found.append(
            CutTensor(
                name=name,
                dtype=dtype,
                shape=layout.shape,
                dim=dim,
                rows=tuple(count for count, _ in parts),
                files=tuple(owner * sharers + index for _, owner in parts),
                part_of=_part_of(spec, index),
            )
        )
    return tuple(found)


def _owned(
    layout: ParamLayout, scope: Scope, mesh: Home, number: int
) -> tuple[int | None, tuple[int, ...], list[int]]:
    """Return the cut dimension, and for each part along it the number of rows and the rank that writes it."""
    g = mesh.ranks_per_node
    if layout.dim is None or scope is Scope.NONE:
        return None, (1,), [number % mesh.ranks]
    if scope is Scope.GLOBAL:
        owners = [(c % mesh.nodes) * g + c // mesh.nodes for c in range(layout.ranks)]
    else:
        owners = [(number % mesh.nodes) * g + place for place in range(g)]
    return layout.dim, layout.rows, owners


def _part_of(spec: ParamSpec, index: int) -> PartOf | None:
    """Return the part of the whole parameter that a rank of a "tp" group has; None if it has all of it."""
    within = None if spec.inner is None else spec.inner.within(index)
    if within is None:
        return None
    first, rows = tuple(run.first for run in within.runs), within.runs[0].rows
    return PartOf(shape=spec.whole_shape, dim=within.dim, first=first, rows=rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A run of the elements of a file's tensor, and where its blocks go.

    first, shape: the first element within the file's tensor, and the shape of the run.
    boxes: `at` counts in the run, `inside` in the wanted tensor.
    """

    first: int
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]


def slabs(
    shape: Sequence[int], held: Iterable[Box], wanted: Iterable[Box], itemsize: int
) -> list[Slab]:
    """Return the slabs of a file's tensor that cover what its blocks and the wanted blocks have in common.

    shape: of the file's tensor.
    """
    row = math.prod(shape[1:])
    step = max(1, SLAB_BYTES // max(1, row * itemsize))
    found: dict[tuple[int, tuple[int, ...]], list[Box]] = {}
    for have, want in itertools.product(held, wanted):
        both = zip(have.at, have.shape, want.at, want.shape, strict=True)
        common = [(max(a, c), min(a + n, c + m)) for a, n, c, m in both]
        if any(a >= b for a, b in common):
            continue
        if not shape:
            return [Slab(first=0, shape=(), boxes=(Box((), (), ()),))]
        firsts, sizes = [a for a, _ in common], [b - a for a, b in common]
        at, inside = (
            [a - of + i for a, of, i in zip(firsts, box.at, box.inside, strict=True)]
            for box in (have, want)
        )
        # A run is rows of the first dimension with everything that the file has of the other dimensions.
        for start in range(0, sizes[0], step):
            rows = min(step, sizes[0] - start)
            box = Box((0, *at[1:]), (inside[0] + start, *inside[1:]), (rows, *sizes[1:]))
            found.setdefault(((at[0] + start) * row, (rows, *shape[1:])), []).append(box)
    return [Slab(first=a, shape=of, boxes=tuple(boxes)) for (a, of), boxes in found.items()]
