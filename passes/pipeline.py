"""The passes in their order; lower graphs with buckets and make their schedules.

    joint graph                        set_apart -> narrow -> partition
    forward, then backward             bucket
    both                               stamp
    each direction and variant         choose_sources -> lower -> schedule -> segment, read by `describe`

Both the backend and the planner use this module, with contexts from different sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from fcdp_compile.passes.bucket import bucket
from fcdp_compile.passes.choose_sources import choose_sources, only_loaded, variants
from fcdp_compile.passes.describe import describe
from fcdp_compile.passes.graph.context import PassContext, Use
from fcdp_compile.passes.graph.inline import clone
from fcdp_compile.passes.graph.runner import Pass, Stages, decide, run
from fcdp_compile.passes.lower import lower
from fcdp_compile.passes.narrow import narrow
from fcdp_compile.passes.partition import partition
from fcdp_compile.passes.schedule import schedule
from fcdp_compile.passes.segment import segment
from fcdp_compile.passes.set_apart import set_apart
from fcdp_compile.passes.stamp import stamp
from fcdp_compile.plan import Direction, Schedule, Variant

Graphs = Mapping[Direction, GraphModule]
Key = tuple[Direction, Variant]

LOWERING: tuple[Pass, ...] = (lower, schedule, segment)
"""The passes that change every variant of a graph."""

PASSES: tuple[Callable[..., Any], ...] = (
    set_apart,
    narrow,
    partition,
    bucket,
    stamp,
    choose_sources,
    *LOWERING,
)
"""All passes in their order (`fcdp dump --passes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """The results of the passes for one compilation.

    placed: the buckets that the graphs gather or reduce, in order of their numbers.  refresh: numbers of the
    buckets that must be cached before a forward starts.
    """

    placed: tuple[Use, ...]
    refresh: tuple[int, ...]
    graphs: dict[Key, GraphModule]
    schedules: tuple[Schedule, ...]


def lower_all(
    graphs: Graphs, contexts: Mapping[Direction, PassContext], stages: Stages | None = None
) -> Lowered:
    """Lower every variant of the graphs.

    contexts: with the buckets of each graph.  stages: gets the result of each pass.
    """
    placed: dict[int, Use] = {}
    refresh: dict[int, None] = {}
    lowered: dict[Key, GraphModule] = {}
    schedules: list[Schedule] = []
    for direction, gm in graphs.items():
        base = contexts[direction]
        placed |= {u.bucket.id: u for u in (*base.uses.values(), *base.reduced.values())}
        for variant in variants(base):
            if direction is not Direction.BACKWARD:
                refresh |= dict.fromkeys(only_loaded(base))
            finished, described = lower_variant(gm, replace(base, variant=variant), stages)
            lowered[direction, variant] = finished
            schedules.append(described)
    return Lowered(
        placed=tuple(placed[i] for i in sorted(placed)),
        refresh=tuple(refresh),
        graphs=lowered,
        schedules=tuple(schedules),
    )


def lower_variant(
    gm: GraphModule, ctx: PassContext, stages: Stages | None = None
) -> tuple[GraphModule, Schedule]:
    """Lower one variant of a graph; `gm` is not changed."""
    title = f"{ctx.direction.value} {ctx.variant.value}"
    uses = decide(choose_sources, gm, ctx, graph=title, stages=stages)
    ctx = replace(ctx, uses=uses)
    finished = run(LOWERING, clone(gm), ctx, graph=title, stages=stages)
    return finished, describe(finished, ctx)
