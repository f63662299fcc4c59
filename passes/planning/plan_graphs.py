"""Plan the graphs of one compilation; the backend compiles this plan and the planner estimates it.

    graphs -> bucket -> stamp -> lower_all -> place_all -> Plan

Nothing here communicates or runs the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fcdp_compile.passes.bucket import bucket, buckets_of
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.graph.runner import Stages, run, watched
from fcdp_compile.passes.memory.choose_tiers import place_steps
from fcdp_compile.passes.memory.placement import Room, place_all
from fcdp_compile.passes.memory.predict import MemoryPrediction, StepMemory
from fcdp_compile.passes.pipeline import (
    Graphs,
    Key,
    Lowered,
    lower_all,
    lower_variant,
    used_again,
)
from fcdp_compile.passes.planning.book import BucketBook, ByKey, buckets_by_key
from fcdp_compile.passes.stamp import stamp
from fcdp_compile.plan import Bucket, Direction, Plan, Schedule, Tier, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan of some graphs, and the lowered graphs.

    memory: of a step with everything on the host that may wait there.  step_memory: the same, for the traced
    sizes.  backward: the context for
    `plan_accumulation`, which lowers the variants for `no_sync`; None without a backward.  wanting: the
    forward's buckets that the strategy keeps on the host.  without_room: the new buckets among `wanting` that
    found no room.
    """

    plan: Plan
    lowered: Lowered
    memory: MemoryPrediction
    step_memory: StepMemory
    backward: PassContext | None
    without_room: tuple[Bucket, ...]
    wanting: tuple[Bucket, ...]


def plan_graphs(
    graphs: Graphs,
    book: BucketBook,
    room: Room,
    base: PassContext,
    *,
    number: int,
    num_fwd_outputs: int = 0,
    stages: Stages | None = None,
) -> Planned:
    """Plan a forward and its backward, or an inference graph; add buckets and stamps to the graphs.

    book: gets the new buckets.  base: a context without buckets.  number: the plan's.
    num_fwd_outputs: how many results of the forward are the caller's.  stages: gets the result of each pass.

    Requires: `set_apart`, and `partition` of a forward and its backward.
    """
    forward, without_room, wanting = _give_buckets(graphs, book, base, stages)
    # A single rank's backward is given the parameters themselves, and autograd notices if they change.
    if Direction.BACKWARD in graphs and base.ranks > 1:
        _stamp(graphs, num_fwd_outputs, stages)
    contexts = {d: book.context(base, d, forward) for d in graphs}
    lowered = lower_all(graphs, contexts, stages)
    memory = MemoryPrediction(
        graphs,
        lowered.graphs,
        lowered.buckets,
        lowered.placements,
        base,
        device_type=room.device_type,
        accumulates=room.accumulates,
    )
    step_memory = memory.at(base.sizes)
    plan = placed_plan(
        step_memory,
        lowered,
        book,
        room,
        nodes=base.nodes,
        ranks_per_node=base.ranks_per_node,
        number=number,
    )
    backward = contexts.get(Direction.BACKWARD)
    return Planned(
        plan=plan,
        lowered=lowered,
        memory=memory,
        step_memory=step_memory,
        backward=backward and replace(backward, backward_buckets=used_again(graphs)),
        without_room=without_room,
        wanting=wanting,
    )


def placed_plan(
    memory: StepMemory,
    lowered: Lowered,
    book: BucketBook,
    room: Room,
    *,
    nodes: int,
    ranks_per_node: int,
    number: int,
) -> Plan:
    """The plan of lowered graphs, with the placements for the predicted memory of a step.

    book: gets the bytes that the plan keeps on the device.
    """
    taken_bytes = room.taken_bytes + book.device_bytes_of_others(lowered.buckets)
    placed, kept_bytes = place_all(memory, lowered, replace(room, taken_bytes=taken_bytes))
    book.keep_on_device(kept_bytes)
    return Plan(
        strategy=", ".join(dict.fromkeys(b.strategy.name for b in placed.buckets)),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        graph=number,
        buckets=placed.buckets,
        placements=tuple(placed.placements.values()),
        refresh=lowered.refresh,
        schedules=placed.schedules,
        peak_bytes=placed.peak_bytes,
        memory_limit_bytes=placed.limit_bytes,
    )


def _give_buckets(
    graphs: Graphs, book: BucketBook, base: PassContext, stages: Stages | None
) -> tuple[ByKey, tuple[Bucket, ...], tuple[Bucket, ...]]:
    """Run `bucket` on the graphs; return the forward's buckets, and `Planned`'s `without_room`, `wanting`."""
    forward: ByKey = {}
    without_room: list[Bucket] = []
    wanting: list[Bucket] = []
    for direction, gm in graphs.items():
        ctx = book.context(base, direction, forward)
        run([bucket], gm, ctx, graph=direction.value, stages=stages)
        book.adopt(gm, base, direction, forward)
        if direction is not Direction.BACKWARD:
            forward = buckets_by_key(gm)
            wanting = [b for b in buckets_of(gm) if b.strategy.keeps_on_host]
            new = [b for b in wanting if b.id >= ctx.next_bucket]
            without_room = [b for b in new if book.is_without_room(b)]
    return forward, tuple(without_room), tuple(wanting)


def plan_accumulation(
    plan: Plan,
    backward: GraphModule,
    book: BucketBook,
    ctx: PassContext,
    stages: Stages | None = None,
) -> tuple[Plan, dict[Key, GraphModule]]:
    """Add a backward's variants within `no_sync` and after it; return the plan and their lowered graphs.

    ctx: `Planned.backward`.
    """
    ctx = book.fit_gradients(backward, ctx)
    placements = {
        p.bucket: p if ctx.placements[p.bucket].accumulates else replace(p, gradient_tier=Tier.NONE)
        for p in plan.placements
    }
    graphs: dict[Key, GraphModule] = {}
    schedules: list[Schedule] = []
    for variant in (Variant.ACCUMULATE, Variant.COLLECT):
        lowered, described = lower_variant(backward, replace(ctx, variant=variant), stages)
        graphs[Direction.BACKWARD, variant] = lowered
        schedules.append(place_steps(described, placements))
    schedules = [*plan.schedules, *schedules]
    return replace(plan, placements=tuple(placements.values()), schedules=tuple(schedules)), graphs


def _stamp(graphs: Graphs, num_fwd_outputs: int, stages: Stages | None) -> None:
    both = {d.value: gm for d, gm in graphs.items()}

    def save_stamps() -> Mapping[str, GraphModule]:
        stamp(*both.values(), num_fwd_outputs=num_fwd_outputs)
        return both

    watched("stamp", both, save_stamps, stages)
