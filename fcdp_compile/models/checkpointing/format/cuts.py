"""Which rank writes which rows, and which bytes of a file a rank needs: arithmetic only.

Each row of a parameter is written once, even if several ranks have a copy.

A file has blocks of a whole tensor (`core.params.layout.Box`), together a tensor of their own.  The rank
wants other blocks, for a tensor of its own.

    file  rows 4:8, all columns      want  rows 6:12, all columns  ->  rows 6:8: one run of bytes
    file  rows 4:8, all columns      want  columns 0:3, all rows   ->  rows 4:8, of which columns 0:3 are kept
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fcdp_compile.core.params.layout import Box, ParamLayout
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import Home
from fcdp_compile.models.checkpointing.format.record import CutTensor, PartOf
from fcdp_compile.strategy import Scope

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
