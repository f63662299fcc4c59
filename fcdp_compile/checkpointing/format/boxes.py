"""Which bytes of which parts of a tensor a rank needs: arithmetic only.

A part has rows [start, start + rows) of one dimension and everything of the others; the rows that a rank
wants are cut in this way too, perhaps along another dimension.

    part  dim 0, rows 4:8       want  dim 0, rows 6:12      ->  rows 6:8: one run of bytes
    part  dim 0, rows 4:8       want  dim 1, rows 0:3       ->  rows 4:8, of which columns 0:3 are kept
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SLAB_BYTES = 2**24
"""Bytes of a part that are read at once, unless one row of its first dimension is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Rows [start, stop) of dimension `dim` and everything of the others; dim None: the whole tensor."""

    dim: int | None
    start: int
    stop: int

    def bounds(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the first and the last index, exclusive, in each dimension."""
        return [
            (self.start, self.stop) if i == self.dim else (0, size) for i, size in enumerate(shape)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slab:
    """A run of a part's elements, and where they go.

    first, shape: the first element within the part, and the shape of the run.
    keep, to: for each dimension, the kept range of the run, and its first index in the wanted rows.
    """

    first: int
    shape: tuple[int, ...]
    keep: tuple[tuple[int, int], ...]
    to: tuple[int, ...]


def slabs(shape: Sequence[int], part: Cut, want: Cut, itemsize: int) -> Iterator[Slab]:
    """Yield the slabs of a part that cover the wanted rows, in the order of the part's elements."""
    has, wants = part.bounds(shape), want.bounds(shape)
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(has, wants, strict=True)]
    if any(a >= b for a, b in common):
        return
    if not shape:
        yield Slab(first=0, shape=(), keep=(), to=())
        return
    # A run is rows of the first dimension with everything that the part has of the other dimensions.
    inner = [b - a for a, b in has[1:]]
    row = math.prod(inner)
    step = max(1, SLAB_BYTES // (row * itemsize))
    keep_inner = [(a - c, b - c) for (a, b), (c, _) in zip(common[1:], has[1:], strict=True)]
    to_inner = [a - c for (a, _), (c, _) in zip(common[1:], wants[1:], strict=True)]
    (first, last), origin, wanted = common[0], has[0][0], wants[0][0]
    for a in range(first, last, step):
        rows = min(step, last - a)
        yield Slab(
            first=(a - origin) * row,
            shape=(rows, *inner),
            keep=((0, rows), *keep_inner),
            to=(a - wanted, *to_inner),
        )
