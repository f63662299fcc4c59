"""Choose the variants of a graph to compile, and find the buckets they load; no graph is changed."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Graph, GraphModule, Node

from fcdp_compile.passes.choose_sources import choose_sources
from fcdp_compile.passes.graph.context import PassContext, Source, Use
from fcdp_compile.plan import Direction, Variant
from fcdp_compile.torch_compat.graphs import graph_module


def variants(ctx: PassContext) -> list[Variant]:
    """Cold alone if no copy outlives the backward; warm alone if cold would store nothing; else both."""
    if ctx.direction is Direction.BACKWARD:
        return [Variant.COLD]
    uses = [u for u in _cold_uses(ctx) if u.bucket.strategy.is_resident]
    if not uses:
        return [Variant.COLD]
    stores = Source.GATHER_AND_STORE in [u.source for u in uses]
    return [Variant.COLD, Variant.WARM] if stores else [Variant.WARM]


def only_loaded(ctx: PassContext) -> list[int]:
    """The buckets that a graph loads even when it is cold."""
    loaded = (u.bucket.id for u in _cold_uses(ctx) if u.source is Source.LOAD)
    return list(dict.fromkeys(loaded))


def _cold_uses(ctx: PassContext) -> list[Use]:
    return list(choose_sources(ctx.uses, replace(ctx, variant=Variant.COLD)).values())


def clone(gm: GraphModule) -> GraphModule:
    """A copy of a graph whose nodes may be changed; it shares fake values and constants."""
    graph = Graph()
    env: dict[Node, Node] = {}
    results = graph.graph_copy(gm.graph, env)
    graph.output(results)
    return graph_module(gm, graph)
