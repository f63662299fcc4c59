"""The passes in their order; lower graphs with buckets and make their schedules.

    joint graph                        set_apart -> partition
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

from fcdp_compile.passes.bucket import bucket, buckets_of, reduced_params
from fcdp_compile.passes.choose_sources import choose_sources
from fcdp_compile.passes.describe import describe
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.graph.runner import Pass, Stages, run
from fcdp_compile.passes.lower import lower
from fcdp_compile.passes.partition import partition
from fcdp_compile.passes.schedule import schedule
from fcdp_compile.passes.segment import segment
from fcdp_compile.passes.set_apart import set_apart
from fcdp_compile.passes.stamp import stamp
from fcdp_compile.passes.variants import clone, only_loaded, variants
from fcdp_compile.plan import Bucket, Direction, Placement, Schedule, Variant

Graphs = Mapping[Direction, GraphModule]
Key = tuple[Direction, Variant]

LOWERING: tuple[Pass, ...] = (choose_sources, lower, schedule, segment)
"""The passes that run for every variant of a graph."""

PASSES: tuple[Callable[..., Any], ...] = (set_apart, partition, bucket, stamp, *LOWERING)
"""All passes in their order (`fcdp dump --passes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """The results of the passes for one compilation.

    buckets: in order of their numbers.  placements: of the buckets, by number.  refresh: numbers of the
    buckets that must be cached before a forward starts.
    """

    buckets: tuple[Bucket, ...]
    placements: Mapping[int, Placement]
    refresh: tuple[int, ...]
    graphs: dict[Key, GraphModule]
    schedules: tuple[Schedule, ...]


def used_again(graphs: Graphs) -> tuple[int, ...]:
    """Numbers of the buckets that the backward uses; none without a backward."""
    backward = graphs.get(Direction.BACKWARD)
    return tuple(b.id for b in buckets_of(backward)) if backward else ()


def lower_all(
    graphs: Graphs, contexts: Mapping[Direction, PassContext], stages: Stages | None = None
) -> Lowered:
    """Lower every variant of the graphs.

    stages: gets the result of each pass.

    Requires: `bucket` on every graph; contexts that know the buckets.
    """
    again = used_again(graphs)
    buckets: dict[int, Bucket] = {}
    placements: dict[int, Placement] = {}
    refresh: dict[int, None] = {}
    lowered: dict[Key, GraphModule] = {}
    schedules: list[Schedule] = []
    for direction, gm in graphs.items():
        base = replace(contexts[direction], backward_buckets=again)
        buckets |= {b.id: b for b in buckets_of(gm)}
        buckets |= {b.id: b for b in reduced_params(gm, base)}
        placements |= base.placements
        for variant in variants(gm, base):
            if direction is not Direction.BACKWARD:
                refresh |= dict.fromkeys(only_loaded(gm, base))
            finished, described = lower_variant(gm, replace(base, variant=variant), stages)
            lowered[direction, variant] = finished
            schedules.append(described)
    return Lowered(
        buckets=tuple(buckets[i] for i in sorted(buckets)),
        placements={i: placements[i] for i in sorted(buckets)},
        refresh=tuple(refresh),
        graphs=lowered,
        schedules=tuple(schedules),
    )


def lower_variant(
    gm: GraphModule, ctx: PassContext, stages: Stages | None = None
) -> tuple[GraphModule, Schedule]:
    """Lower one variant of a graph; `gm` is not changed."""
    title = f"{ctx.direction.value} {ctx.variant.value}"
    finished = run(LOWERING, clone(gm), ctx, graph=title, stages=stages)
    return finished, describe(finished, ctx)
