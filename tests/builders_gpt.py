"""A GPT of matrix products: its graphs after all passes, its schedules and its plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from torch.fx import Node

from builders_graph import (
    GraphBuilder,
    Lowered,
    Where,
    aten,
    lower_pair,
    make_context,
    make_specs,
)
from fcdp_compile.passes.describe import describe
from fcdp_compile.plan import Direction, Kind, Plan, Schedule, Tier, Variant

WHERE = Where(nodes=2, ranks_per_node=4)
HIDDEN, TOKENS, VOCABULARY = 512, 4096, 8192
MATRICES = {"qkv": 3, "out": 1, "up": 4, "down": 4}  # a GPT layer: 12 H * H in all


def gpt(
    layers: int, *, strategy: str = "fcdp", frozen: bool = False, scheduled: bool = True
) -> dict[tuple[Direction, Variant], Schedule]:
    """The schedules of the GPT: an embedding, then for each layer a bucket of four matrices."""
    return _schedules(
        lower_gpt(layers, strategy=strategy, frozen=frozen, scheduled=scheduled, hidden=HIDDEN)
    )


def gpt_plan(
    layers: int,
    *,
    strategy: str = "fcdp",
    frozen: bool = False,
    hidden: int = HIDDEN,
    memory_limit_bytes: int | None = None,
) -> Plan:
    """A plan of the GPT, with a made-up memory curve if there is a limit."""
    made = lower_gpt(layers, strategy=strategy, frozen=frozen, hidden=hidden)
    buckets = {
        i: replace(
            b,
            why="one layer",
        )
        for i, b in made.buckets.items()
    }
    schedules = list(_schedules(made).values())
    peak_bytes = None
    if memory_limit_bytes is not None:
        full = {i: b.full_bytes for i, b in buckets.items()}
        schedules = [replace(s, memory_bytes=_memory(s, full)) for s in schedules]
        peak_bytes = max(max(s.memory_bytes) for s in schedules)
    return Plan(
        strategy=strategy,
        nodes=WHERE.nodes,
        ranks_per_node=WHERE.ranks_per_node,
        graph=0,
        buckets=tuple(buckets[i] for i in sorted(buckets)),
        placements=tuple(
            replace(at, why="node shard on the host" if at.tier is Tier.HOST else "kept nowhere")
            for _, at in sorted(made.placements.items())
        ),
        refresh=tuple(sorted(buckets)) if frozen else (),
        schedules=tuple(schedules),
        peak_bytes=peak_bytes,
        memory_limit_bytes=memory_limit_bytes,
    )


@cache
def lower_gpt(
    layers: int,
    *,
    strategy: str,
    frozen: bool,
    hidden: int,
    scheduled: bool = True,
) -> Lowered:
    """Runs the GPT's forward and backward through all passes."""
    shapes = {"wte.weight": (VOCABULARY // HIDDEN * hidden, hidden)}
    for i in range(layers):
        shapes |= {f"h.{i}.{name}.weight": (n * hidden, hidden) for name, n in MATRICES.items()}
    specs = make_specs(shapes, WHERE)
    ctx = make_context(
        specs,
        WHERE,
        strategy=strategy,
        bucket_bytes=12 * hidden * hidden * 4,
        frozen=shapes if frozen else (),
    )
    b = GraphBuilder(specs)
    shards = {n: b.shard(n) for n in shapes}
    x = b.input("x", (TOKENS, hidden))
    for name in shapes:
        x = there_and_back(b, x, b.unshard(shards[name], name))
    fw = b.finish(x, *shards.values())
    b = GraphBuilder(specs)
    shards = {n: b.shard(n) for n in shapes}
    g = b.input("g", (TOKENS, hidden))
    grads: dict[str, Node] = {}
    for name in reversed(shapes):
        w = b.unshard(shards[name], name)
        wide = b.call(aten.mm.default, g, b.call(aten.t.default, w))
        if not frozen:
            grad = b.call(aten.mm.default, b.call(aten.t.default, wide), g)
            grads[name] = b.reduce_grad(grad, name)
        g = b.call(aten.mm.default, wide, w)
    bw = b.finish(g, *(grads.get(n) for n in shapes))
    return lower_pair(fw, bw, ctx, num_fwd_outputs=1, scheduled=scheduled, segmented=True)


def there_and_back(b: GraphBuilder, x: Node, w: Node) -> Node:
    wide = b.call(aten.mm.default, x, b.call(aten.t.default, w))
    return b.call(aten.mm.default, wide, w)


def _schedules(made: Lowered) -> dict[tuple[Direction, Variant], Schedule]:
    return {key: describe(gm, made.contexts[key]) for key, gm in made.graphs.items()}


def _memory(schedule: Schedule, full_bytes: Mapping[int, int]) -> tuple[int, ...]:
    """Bytes at each step: gathered parameters, and activations that grow in forward, shrink in backward."""
    held: set[int] = set()
    total = sum(full_bytes.values())
    layer = max(full_bytes.values())
    now, curve = total // 8, []
    for step in schedule.steps:
        if step.kind is Kind.INTRA_ALL_GATHER and step.bucket is not None:
            held.add(step.bucket)
        curve.append(now + sum(full_bytes[b] for b in held))
        if step.kind is Kind.FREE and step.bucket is not None:
            held.discard(step.bucket)
            now += layer // 2 * (-1 if schedule.direction is Direction.BACKWARD else 1)
    if schedule.direction is Direction.BACKWARD:
        lowest = min(curve)
        return tuple(total // 8 + size - lowest for size in curve)
    return tuple(curve)
