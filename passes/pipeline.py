"""From traced graphs with buckets to lowered graphs and their schedules: the passes, in order.

    for each direction and variant: place -> lower -> schedule -> segment -> describe

A part of the backend and of the planner, which differ in where contexts come from and in what they do with
the graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fcdp_compile.passes.bucket import buckets_of, reduced_params
from fcdp_compile.passes.choose_sources import place
from fcdp_compile.passes.describe import describe
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.lower import lower
from fcdp_compile.passes.schedule import schedule
from fcdp_compile.passes.segment import segment
from fcdp_compile.passes.variants import clone, only_loaded, variants
from fcdp_compile.plan import Bucket, Direction, Schedule, Tier, Variant

Graphs = Mapping[Direction, GraphModule]
Key = tuple[Direction, Variant]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """What the passes made of the graphs of one compilation.

    buckets: in order of their numbers.  refresh: those that must be cached before a forward starts.
    """

    buckets: tuple[Bucket, ...]
    refresh: tuple[int, ...]
    graphs: dict[Key, GraphModule]
    schedules: tuple[Schedule, ...]


def used_again(graphs: Graphs) -> tuple[int, ...]:
    """The buckets that the backward of some graphs uses."""
    backward = graphs.get(Direction.BACKWARD)
    return tuple(b.id for b in buckets_of(backward)) if backward else ()


def lower_all(graphs: Graphs, contexts: Mapping[Direction, PassContext]) -> Lowered:
    """Lower every variant of the graphs.

    Requires: `bucket` on every graph; contexts that know the buckets.
    """
    again = used_again(graphs)
    buckets: dict[int, Bucket] = {}
    refresh: dict[int, None] = {}
    lowered: dict[Key, GraphModule] = {}
    schedules: list[Schedule] = []
    for direction, gm in graphs.items():
        base = replace(contexts[direction], backward_buckets=again)
        buckets |= {b.id: b for b in buckets_of(gm)}
        buckets |= {b.id: b for b in reduced_params(gm, base)}
        for variant in variants(gm, base):
            if direction is not Direction.BACKWARD:
                refresh |= dict.fromkeys(only_loaded(gm, base))
            finished, described = lower_variant(gm, replace(base, variant=variant))
            lowered[direction, variant] = finished
            schedules.append(described)
    return Lowered(
        buckets=tuple(buckets[i] for i in sorted(buckets)),
        refresh=tuple(refresh),
        graphs=lowered,
        schedules=tuple(schedules),
    )


def lower_variant(gm: GraphModule, ctx: PassContext) -> tuple[GraphModule, Schedule]:
    """Lower one variant of a graph, which stays as it is."""
    finished = segment(schedule(lower(place(clone(gm), ctx), ctx), ctx))
    return finished, describe(finished, ctx)


def known_to_backward(mine: Bucket | None, found: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """What a backward knows of a parameter: its forward's bucket first.

    It loads what that one stored, or else gathers for itself.

    mine: the forward's.  found: all that the model has.
    """
    if mine is None:
        return found
    if mine.tier is not Tier.NONE:
        return (mine,)
    return (mine, *(b for b in found if b.tier is Tier.NONE))
