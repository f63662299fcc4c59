"""Plan the graphs of one compilation; the backend compiles this plan and the planner estimates it.

    graphs -> bucket -> stamp -> lower_all -> place_all -> Plan

Nothing here communicates or runs the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.bucket import bucket
from fcdp_compile.passes.graph.context import PassContext, Uses, buckets_of, keys_of
from fcdp_compile.passes.graph.runner import Stages, decide, watched
from fcdp_compile.passes.memory.choose_tiers import place_steps
from fcdp_compile.passes.memory.predict import MemoryPrediction, StepMemory, left_bytes
from fcdp_compile.passes.pipeline import (
    Graphs,
    Key,
    Lowered,
    lower_all,
    lower_variant,
)
from fcdp_compile.passes.planning.book import BucketBook
from fcdp_compile.passes.planning.placement import Room, place_all
from fcdp_compile.passes.stamp import stamp
from fcdp_compile.plan import Bucket, Direction, Plan, Schedule, Tier, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plan of some graphs, and the lowered graphs.

    memory: predicts a step's memory for any batch size, before anything moves to the GPU.
    step_memory: its value for the traced sizes.  beside_bytes: what other layers that share the graphs save.
    backward: the context for `plan_accumulation`, which lowers the variants for `no_sync`; None without a
    backward.  wanting: the forward's buckets that the strategy keeps on the host.  without_room: the new
    buckets among `wanting` that found no room.
    """

    plan: Plan
    lowered: Lowered
    memory: MemoryPrediction
    step_memory: StepMemory
    beside_bytes: int
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
    """Plan a forward and its backward, or an inference graph; add stamps to the graphs.

    Equal layers may share the graphs.  Then the values that the other layers save until their backwards take
    memory, too.

    book: gets the new buckets.  base: a context without buckets.  number: the plan's.
    num_fwd_outputs: how many results of the forward are the caller's.  stages: gets the result of each pass.

    Requires: `set_apart`, and `partition` of a forward and its backward.
    """
    base = replace(base, specs={**base.specs, **_gathered(graphs, base)})
    beside_bytes = 0
    if Direction.BACKWARD in graphs:
        forward = graphs[Direction.FORWARD]
        left = left_bytes(forward, base.sizes, room.device_type)
        beside_bytes = (book.calls(keys_of(forward, UNSHARD)) - 1) * left
    contexts, without_room, wanting = _give_buckets(graphs, book, base, stages)
    # A single rank's backward is given the parameters themselves, and autograd notices if they change.
    if Direction.BACKWARD in graphs and base.ranks > 1:
        _stamp(graphs, contexts, num_fwd_outputs, stages)
    lowered = lower_all(graphs, contexts, stages)
    memory = MemoryPrediction(
        graphs,
        lowered.graphs,
        lowered.placed,
        base,
        device_type=room.device_type,
        accumulates=room.accumulates,
    )
    step_memory = memory.at(base.sizes)
    plan = place_all(
        step_memory,
        lowered,
        book,
        replace(room, taken_bytes=room.taken_bytes + beside_bytes),
        nodes=base.nodes,
        ranks_per_node=base.ranks_per_node,
        number=number,
    )
    return Planned(
        plan=plan,
        lowered=lowered,
        memory=memory,
        step_memory=step_memory,
        beside_bytes=beside_bytes,
        backward=contexts.get(Direction.BACKWARD),
        without_room=without_room,
        wanting=wanting,
    )


def _gathered(graphs: Graphs, base: PassContext) -> dict[str, ParamSpec]:
    """The specs of the parameters that the graphs gather, with the gather dtype that they use (`narrow`)."""
    reads = [
        node
        for gm in graphs.values()
        for node in gm.graph.find_nodes(op="call_function", target=UNSHARD)
    ]
    return {
        str(key): replace(base.specs[str(key)], gather_dtype=dtype[0])
        for _, key, *dtype in (node.args for node in reads)
        if dtype
    }


def _give_buckets(
    graphs: Graphs, book: BucketBook, base: PassContext, stages: Stages | None
) -> tuple[dict[Direction, PassContext], tuple[Bucket, ...], tuple[Bucket, ...]]:
    """Run `bucket` for the graphs; return a context with the buckets of each, and `Planned`'s `without_room`,
    `wanting`.
    """
    uses: dict[Direction, Uses] = {}
    forward: Uses = {}
    without_room: list[Bucket] = []
    wanting: list[Bucket] = []
    for direction, gm in graphs.items():
        ctx = book.context(base, direction, forward)
        uses[direction] = decide(bucket, gm, ctx, graph=direction.value, stages=stages)
        book.adopt(uses[direction], base, direction, forward)
        if direction is not Direction.BACKWARD:
            forward = uses[direction]
            wanting = [b for b in buckets_of(forward) if b.strategy.keeps_on_host]
            new = [b for b in wanting if b.id >= ctx.next_bucket]
            without_room = [b for b in new if book.is_without_room(b)]
    again = tuple(b.id for b in buckets_of(uses.get(Direction.BACKWARD, {})))
    contexts: dict[Direction, PassContext] = {}
    for direction, gm in graphs.items():
        ctx = book.context(base, direction, forward)
        contexts[direction] = replace(
            ctx,
            uses=uses[direction],
            reduced={key: ctx.serving(key)[0] for key in keys_of(gm, REDUCE_GRAD)},
            backward_buckets=again,
        )
    return contexts, tuple(without_room), tuple(wanting)


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
    ctx = book.fit_gradients(ctx)
    accumulated = {u.bucket.id for u in ctx.reduced.values() if u.placement.accumulates}
    placements = {
        p.bucket: p if p.bucket in accumulated else replace(p, gradient_tier=Tier.NONE)
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


def _stamp(
    graphs: Graphs,
    contexts: Mapping[Direction, PassContext],
    num_fwd_outputs: int,
    stages: Stages | None,
) -> None:
    fw, bw = graphs.values()
    both = {d.value: gm for d, gm in graphs.items()}
    buckets = contexts[Direction.BACKWARD].backward_buckets

    def save_stamps() -> Mapping[str, GraphModule]:
        stamp(fw, bw, buckets, num_fwd_outputs=num_fwd_outputs)
        return both

    watched("stamp", both, save_stamps, stages, {d.value: contexts[d].uses for d in graphs})
