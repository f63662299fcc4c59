"""Decide how a graph gets the node shard of each of its buckets."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule, Node

from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.graph.context import META, PassContext, Source, Use, use_of
from fcdp_compile.plan import Direction, Variant


def choose_sources(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Give every `unshard` the source of its bucket.

        one node, tier none               HOME
        several nodes, tier none          GATHER
        backward                          LOAD
        kept until the backward           GATHER_AND_STORE if the backward uses it, else GATHER
        kept until changed: frozen        LOAD (refreshed before the graph starts when stale)
                            cold          GATHER_AND_STORE
                            warm          LOAD

    A graph that reads a parameter of a bucket from another bucket, or not at all, cannot gather the bucket;
    it loads it.

    Requires: `bucket`.
    Leaves: a source on every `unshard`; no other change.
    """
    for node, use in uses_with_sources(gm, ctx).items():
        node.meta[META] = use
    return gm


def uses_with_sources(gm: GraphModule, ctx: PassContext) -> dict[Node, Use]:
    """The record of each `unshard` with the source that `choose_sources` gives it; no graph is changed."""
    nodes = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    uses = {node: use_of(node) for node in nodes}
    present: dict[int, set[str]] = {}
    for node, use in uses.items():
        present.setdefault(use.bucket.id, set()).add(ctx.specs[str(node.args[1])].name)
    return {
        n: replace(use, source=_source(use, present[use.bucket.id], ctx)) for n, use in uses.items()
    }


def _source(use: Use, present: set[str], ctx: PassContext) -> Source:
    bucket = use.bucket
    if not use.placement.is_cached:
        return Source.HOME if bucket.nodes == 1 else Source.GATHER
    if ctx.direction is Direction.BACKWARD:
        return Source.LOAD
    if not bucket.strategy.is_resident:
        used_again = bucket.id in ctx.backward_buckets
        return Source.GATHER_AND_STORE if used_again else Source.GATHER
    whole = all(p.name in present for p in bucket.params)
    cold = ctx.variant is Variant.COLD and whole and not bucket.frozen
    return Source.GATHER_AND_STORE if cold else Source.LOAD
