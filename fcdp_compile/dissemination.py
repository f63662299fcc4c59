"""How all ranks come to know what any of them says, in few hops: who tells whom, round by round.

    within a node, of 4          0 ─▶ 1   1 ─▶ 2   2 ─▶ 3   3 ─▶ 0      each passes on what it knows
                                 0 ─▶ 2   1 ─▶ 3   2 ─▶ 0   3 ─▶ 1
    then between nodes           the same among the ranks at one place of all nodes

A round doubles how many ranks' words each rank knows, so there are log2(g) rounds within a node and log2(N)
between nodes, both rounded up.  A ring takes N*g - 1 hops.

Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One hop: whom a rank sends to and whom it receives from, as (node, place)."""

    to: tuple[int, int]
    source: tuple[int, int]


def rounds(nodes: int, ranks_per_node: int, node: int, place: int) -> Iterator[Round]:
    """The rounds of the rank at a place of a node, in their order."""
    for step in _steps(ranks_per_node):
        there, here = ((place + by) % ranks_per_node for by in (step, -step))
        yield Round(to=(node, there), source=(node, here))
    for step in _steps(nodes):
        there, here = ((node + by) % nodes for by in (step, -step))
        yield Round(to=(there, place), source=(here, place))


def hops(ranks: int) -> int:
    """How many rounds it takes among so many ranks."""
    return len(list(_steps(ranks)))


def _steps(ranks: int) -> Iterator[int]:
    step = 1
    while step < ranks:
        yield step
        step *= 2
