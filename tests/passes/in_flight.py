"""Bytes in flight by definition, from the order of the nodes alone."""

from __future__ import annotations

from torch.fx import Node

from fcdp_compile import ops
from fcdp_compile.passes.graph.context import PassContext
from tests.passes.scheduled import GATHERS, REDUCTIONS, SPREADS, last_wait, users


def nbytes(node: Node) -> int:
    return node.meta["val"].numel() * node.meta["val"].dtype.itemsize


def gathers_in_flight(nodes: list[Node], ctx: PassContext, *, stores: bool) -> list[int]:
    """Bytes of node shards and full parameters after each node.  stores: until their stores end, too."""
    at = {n: i for i, n in enumerate(nodes)}
    alive = [0] * len(nodes)
    for start in (n for n in nodes if n.target in GATHERS):
        wait = last_wait(start)
        made = nbytes(wait)
        if users(start, *SPREADS):
            parts = ctx.nodes if start.target is ops.intra_own_all_gather else ctx.ranks_per_node
            made //= parts
        ends = [at[f] for f in users(wait, ops.free)] or [len(nodes)]
        # The other inputs of the second gather count as long as the node shard.
        beside = [n for u in users(start, *SPREADS) for n in u.all_input_nodes]
        chain = [start, *start.all_input_nodes, *start.users, *beside]
        if stores:
            ends += [at[w] for n in chain for s in users(n, ops.store) for w in s.users]
        add(alive, at[start], max(ends), made)
    return alive


def gradients_in_flight(nodes: list[Node], ctx: PassContext) -> list[int]:
    """Bytes of gradients in flight after each node."""
    at = {n: i for i, n in enumerate(nodes)}
    alive = [0] * len(nodes)
    for start in (n for n in nodes if n.target in REDUCTIONS):
        (given,) = start.all_input_nodes
        if given.target in REDUCTIONS:
            continue
        end = at[last_wait(start)]
        read = min([at[w] for w in users(start, ops.wait)], default=end)
        add(alive, at[start], read, nbytes(given))
        add(alive, at[start], end, left_of(start, ctx))
    return alive


def left_of(start: Node, ctx: PassContext) -> int:
    """Bytes of the result of a reduction's first half, which may add up in a wider dtype."""
    if start.target is ops.collect:
        return nbytes(start)
    ranks = ctx.ranks_per_node if start.target is ops.intra_reduce_scatter else ctx.nodes
    return nbytes(start.all_input_nodes[0]) // ranks


def add(alive: list[int], start: int, end: int, size: int) -> None:
    assert start < end
    for i in range(start, end):
        alive[i] += size


def peak(nodes: list[Node], ctx: PassContext) -> int:
    gathers = gathers_in_flight(nodes, ctx, stores=True)
    gradients = gradients_in_flight(nodes, ctx)
    return max(a + b for a, b in zip(gathers, gradients, strict=True))


def largest_reduction(nodes: list[Node], ctx: PassContext) -> int:
    firsts = [
        n for n in nodes if n.target in REDUCTIONS and n.all_input_nodes[0].target not in REDUCTIONS
    ]
    return max((nbytes(n.all_input_nodes[0]) + left_of(n, ctx) for n in firsts), default=0)


def least(before: list[Node], ctx: PassContext) -> int:
    """The bytes that are always allowed: gathers just in time, and one reduction."""
    return max(gathers_in_flight(before, ctx, stores=False)) + largest_reduction(before, ctx)
