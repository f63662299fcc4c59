"""Which rows of a parameter each rank owns, and where they are in a bucket: arithmetic only.

[Note: chunk order]
A parameter's sharded dimension is cut first over the g places of a node, then each piece over the N
nodes, as `torch.chunk` cuts (equal chunks, the last ones shorter or empty).  Rank (n, l), place l of
node n, owns chunk l*N + n.  So the inter-node all-gather of the ranks at place l gives piece l,
contiguous, and the intra-node all-gather of the pieces gives the parameter, contiguous.  In DTensor
terms: placements [Shard(d), Shard(d)] on a mesh with dimensions ("intra", "inter").

[Note: slots]
Every rank contributes a slot of the same size to a collective: `slot_rows` rows, the largest chunk.
Shorter chunks are padded at their end.  Where the sharded dimension is divisible by G there is no padding.

[Note: home nodes]
A matrix may have a home node, for optimizers that need whole matrices (Muon): it is cut over the places
only, and rank (n, l) owns all of piece l if n is the home node, else no rows.  In DTensor terms: placements
[Shard(d), NodeShard(d, n)].  A node shard then has one slot of each such matrix, not N.

A scalar cannot be sharded: every rank owns it, its slot holds one element on every rank, and its
gradient is reduced into every slot.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fcdp_compile.errors import ArgumentError


def chunk_rows(rows: int, chunks: int) -> list[int]:
    """Rows of each of `chunks` pieces, cut as `torch.chunk` cuts but always `chunks` long."""
    size = -(-rows // chunks)
    return [max(0, min(size, rows - i * size)) for i in range(chunks)]


class Span(NamedTuple):
    """Consecutive rows of a whole tensor."""

    first: int
    rows: int


def rows_of_part(rows: int, parts: int, index: int, matrices: int = 1) -> list[Span]:
    """The rows that one of several parts has of a tensor, or of each of several matrices within it."""
    size = rows // matrices
    mine = chunk_rows(size, parts)
    return [Span(i * size + sum(mine[:index]), mine[index]) for i in range(matrices)]


class Box(NamedTuple):
    """A block of a whole tensor that a part of the tensor has.

    at: the block's first index in the whole tensor.  inside: its first index in the part.  shape: its shape.
    """

    at: tuple[int, ...]
    inside: tuple[int, ...]
    shape: tuple[int, ...]


class Within(NamedTuple):
    """The rows of a whole tensor, along one dimension, that a tensor consists of, in order."""

    dim: int
    runs: tuple[Span, ...]


def boxes(
    shape: Sequence[int], dim: int | None, rows: Span, within: Within | None = None
) -> list[Box]:
    """The blocks of a whole tensor that some rows of a tensor are; `Box.inside` counts from these rows.

    shape: of the tensor.  dim: the dimension of the rows; None: the rows are all of the tensor.
    within: where the tensor is in the whole tensor; None: it is the whole tensor.
    """
    if not shape:
        return [Box((), (), ())]
    spans = [[(0, 0, size)] for size in shape]
    if within is not None:
        counts = [run.rows for run in within.runs]
        spans[within.dim] = [
            (run.first, sum(counts[:i]), run.rows) for i, run in enumerate(within.runs)
        ]
    if dim is not None:
        first, last = rows.first, rows.first + rows.rows
        common = [(max(i, first), min(i + n, last), at - i) for at, i, n in spans[dim]]
        spans[dim] = [(a + ahead, a - first, b - a) for a, b, ahead in common if a < b]
    found = (zip(*block, strict=True) for block in itertools.product(*spans))
    return [Box(*map(tuple, block)) for block in found]


def largest_chunk(rows: int, nodes: int, ranks_per_node: int) -> int:
    """Rows of the first chunk in [Note: chunk order], which is the largest."""
    piece = -(-rows // ranks_per_node)
    return -(-piece // nodes)


def choose_dim(
    shape: Sequence[int], nodes: int, ranks_per_node: int, but: int | None = None
) -> int | None:
    """Choose the dimension to shard: the first with the least padding; None for a scalar.

    but: a dimension that must stay as it is.

    A rank-4 adapter of shape (4, 4096) on 8 ranks is cut along its second dimension: along the first
    every rank would send a slot of one row, twice the adapter in all.
    """
    if not shape:
        return None

    def padded(dim: int) -> int:
        slot = largest_chunk(shape[dim], nodes, ranks_per_node)
        others = math.prod(s for i, s in enumerate(shape) if i != dim)
        return slot * nodes * ranks_per_node * others

    dims = [dim for dim in range(len(shape)) if dim != but]
    return min(dims, key=lambda dim: (padded(dim), dim))


def sizes_by_node(layouts: Sequence[ParamLayout]) -> tuple[int, ...] | None:
    """How many elements of these parameters a rank of each node contributes; None if all nodes equally many.

    layouts: of parameters of which all or none have home nodes.
    """
    if all(layout.home_node is None for layout in layouts):
        return None
    nodes = range(layouts[0].nodes)
    return tuple(sum(layout.elements_of(n) for layout in layouts) for n in nodes)


class Run(NamedTuple):
    """Consecutive slots that own equally many rows each."""

    slots: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamLayout:
    """How one parameter of shape `shape` is cut over N = `nodes` times g = `ranks_per_node` ranks.

    dim: the sharded dimension, or None for a scalar.  See [Note: chunk order] and [Note: slots].
    home_node: the node that owns all rows, or None if all nodes own rows; see [Note: home nodes].
    """

    shape: tuple[int, ...]
    dim: int | None
    nodes: int
    ranks_per_node: int
    home_node: int | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ArgumentError(
                f"layout needs at least one rank, not {self.nodes} x {self.ranks_per_node}"
            )
        if (self.dim is None) != (not self.shape) or not (
            self.dim is None or 0 <= self.dim < len(self.shape)
        ):
            raise ArgumentError(f"dimension {self.dim} does not exist in shape {self.shape}")
        if self.home_node is not None and not 0 <= self.home_node < self.nodes:
            raise ArgumentError(f"home node {self.home_node} is none of {self.nodes} nodes")

    @staticmethod
    def of(
        shape: Sequence[int], nodes: int, ranks_per_node: int, home_node: int | None = None
    ) -> ParamLayout:
        """The layout with the dimension chosen by `choose_dim`."""
        return ParamLayout(
            shape=tuple(shape),
            dim=choose_dim(shape, nodes if home_node is None else 1, ranks_per_node),
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            home_node=home_node,
        )

    @property
    def ranks(self) -> int:
        """G, the number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def row_elements(self) -> int:
        """Elements of one row of the sharded dimension."""
        return math.prod(s for i, s in enumerate(self.shape) if i != self.dim)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows owned by each rank in chunk order; a scalar counts as one row in every slot."""
        if self.dim is None:
            return (1,) * self.ranks
        if self.home_node is None:
            return _rows(self.shape[self.dim], self.nodes, self.ranks_per_node)
        pieces = chunk_rows(self.shape[self.dim], self.ranks_per_node)
        return tuple(r if n == self.home_node else 0 for r in pieces for n in range(self.nodes))

    @property
    def slots_per_node_shard(self) -> int:
        """How many slots of the parameter a node shard has: N, or one of the home node."""
        return self.nodes if self.home_node is None else 1

    @property
    def slots(self) -> int:
        """How many slots of the parameter the gathered buffer has."""
        return self.slots_per_node_shard * self.ranks_per_node

    @property
    def runs(self) -> tuple[Run, ...]:
        """The rows of each slot, as runs of slots with equally many; few, however many the ranks."""
        if self.home_node is None or self.dim is None:
            return _runs(self.rows)
        return _runs(self.rows[self.home_node :: self.nodes])

    @property
    def slot_rows(self) -> int:
        """Rows of a slot, the largest chunk."""
        if self.dim is None:
            return 1
        return largest_chunk(self.shape[self.dim], self.slots_per_node_shard, self.ranks_per_node)

    @property
    def slot_elements(self) -> int:
        """P/G: elements that every rank that has a slot contributes to a collective."""
        return self.slot_rows * self.row_elements

    def elements_of(self, node: int) -> int:
        """Elements that a rank of this node contributes to a collective."""
        return self.slot_elements if self.home_node in (None, node) else 0

    @property
    def is_even(self) -> bool:
        """Whether every rank owns a full slot of rows, so that nothing is padded."""
        return self.dim is not None and all(run.rows == self.slot_rows for run in self.runs)

    def chunk(self, node: int, place: int) -> int:
        """The chunk that the rank at place `place` of node `node` owns."""
        return place * self.nodes + node

    def local_shape(self, node: int, place: int) -> tuple[int, ...]:
        """Shape of the home shard of that rank."""
        if self.dim is None:
            return ()
        rows = self.rows[self.chunk(node, place)]
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    def local_start(self, node: int, place: int) -> int:
        """First row of the home shard of that rank within the sharded dimension."""
        return 0 if self.dim is None else sum(self.rows[: self.chunk(node, place)])

    def local_rows(self, node: int, place: int) -> Span:
        """The rows of the home shard of that rank; a scalar counts as one row."""
        return Span(self.local_start(node, place), self.rows[self.chunk(node, place)])


# A plan for thousands of ranks asks for the same few layouts again and again.
@functools.lru_cache(maxsize=1024)
def _rows(rows: int, nodes: int, ranks_per_node: int) -> tuple[int, ...]:
    pieces = chunk_rows(rows, ranks_per_node)
    return tuple(r for piece in pieces for r in chunk_rows(piece, nodes))


@functools.lru_cache(maxsize=1024)
def _runs(rows: tuple[int, ...]) -> tuple[Run, ...]:
    found = [(of, len(list(same))) for of, same in itertools.groupby(rows)]
    return tuple(Run(slots=count, rows=of) for of, count in found)
