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


def largest_chunk(rows: int, nodes: int, ranks_per_node: int) -> int:
    """Rows of the first chunk in [Note: chunk order], which is the largest."""
    piece = -(-rows // ranks_per_node)
    return -(-piece // nodes)


def choose_dim(shape: Sequence[int], nodes: int, ranks_per_node: int) -> int | None:
    """Choose the dimension to shard: the first with the least padding; None for a scalar.

    A rank-4 adapter of shape (4, 4096) on 8 ranks is cut along its second dimension: along the first
    every rank would send a slot of one row, twice the adapter in all.
    """
    if not shape:
        return None

    def padded(dim: int) -> int:
        slot = largest_chunk(shape[dim], nodes, ranks_per_node)
        others = math.prod(s for i, s in enumerate(shape) if i != dim)
        return slot * nodes * ranks_per_node * others

    return min(range(len(shape)), key=lambda dim: (padded(dim), dim))


class Run(NamedTuple):
    """Consecutive slots that own equally many rows each."""

    slots: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamLayout:
    """How one parameter of shape `shape` is cut over N = `nodes` times g = `ranks_per_node` ranks.

    dim: the sharded dimension, or None for a scalar.  See [Note: chunk order] and [Note: slots].
    """

    shape: tuple[int, ...]
    dim: int | None
    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.ranks_per_node < 1:
            raise ArgumentError(
                f"layout needs at least one rank, not {self.nodes} x {self.ranks_per_node}"
            )
        if (self.dim is None) != (not self.shape) or not (
            self.dim is None or 0 <= self.dim < len(self.shape)
        ):
            raise ArgumentError(f"dimension {self.dim} does not exist in shape {self.shape}")

    @staticmethod
    def of(shape: Sequence[int], nodes: int, ranks_per_node: int) -> ParamLayout:
        """The layout with the dimension chosen by `choose_dim`."""
        return ParamLayout(
            shape=tuple(shape),
            dim=choose_dim(shape, nodes, ranks_per_node),
            nodes=nodes,
            ranks_per_node=ranks_per_node,
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
        return _rows(self.shape[self.dim], self.nodes, self.ranks_per_node)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The rows of each rank, as runs of ranks that own equally many; few, however many the ranks."""
        return _runs(self.rows)

    @property
    def slot_rows(self) -> int:
        """Rows of a slot, the largest chunk."""
        if self.dim is None:
            return 1
        return largest_chunk(self.shape[self.dim], self.nodes, self.ranks_per_node)

    @property
    def slot_elements(self) -> int:
        """P/G: elements that every rank contributes to a collective."""
        return self.slot_rows * self.row_elements

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


# A plan for thousands of ranks asks for the same few layouts again and again.
@functools.lru_cache(maxsize=1024)
def _rows(rows: int, nodes: int, ranks_per_node: int) -> tuple[int, ...]:
    pieces = chunk_rows(rows, ranks_per_node)
    return tuple(r for piece in pieces for r in chunk_rows(piece, nodes))


@functools.lru_cache(maxsize=1024)
def _runs(rows: tuple[int, ...]) -> tuple[Run, ...]:
    found = [(of, len(list(same))) for of, same in itertools.groupby(rows)]
    return tuple(Run(slots=count, rows=of) for of, count in found)
