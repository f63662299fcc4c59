"""Schedules in time, on simulated lanes: how much of the transfers is left exposed.

    time of the schedule / max(compute, inter, intra, H2D, D2H)

No order of the same steps is faster than its busiest lane.
"""

from __future__ import annotations

from functools import cache

import pytest
from torch.fx import Node

from builders_graph import GraphBuilder, Where, aten, lower_pair, make_context, make_specs
from fcdp_compile.cost import Link, Machine, simulate
from fcdp_compile.passes.describe import describe
from fcdp_compile.plan import Direction, Kind, Lane, Schedule, Variant

WHERE = Where(nodes=2, ranks_per_node=4)
HIDDEN, TOKENS, VOCABULARY = 512, 4096, 8192
MATRICES = {"qkv": 3, "out": 1, "up": 4, "down": 4}  # a GPT layer: 12 H * H in all
LAYER_BYTES = 12 * HIDDEN * HIDDEN * 4

FORWARD = (Direction.FORWARD, Variant.COLD)
WARM = (Direction.FORWARD, Variant.WARM)
BACKWARD = (Direction.BACKWARD, Variant.COLD)


@cache
def gpt(
    layers: int, *, strategy: str = "fcdp", frozen: bool = False, scheduled: bool = True
) -> dict[tuple[Direction, Variant], Schedule]:
    """The schedules of the matrix products of a GPT: an embedding, then a bucket of four matrices a layer."""
    shapes = {"wte": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        shapes |= {f"{i}.{name}": (n * HIDDEN, HIDDEN) for name, n in MATRICES.items()}
    specs = make_specs(shapes, WHERE)
    ctx = make_context(
        specs,
        WHERE,
        strategy=strategy,
        bucket_bytes=LAYER_BYTES,
        frozen=shapes if frozen else (),
    )
    b = GraphBuilder(specs)
    shards = {n: b.shard(n) for n in shapes}
    x = b.input("x", (TOKENS, HIDDEN))
    for name in shapes:
        x = there_and_back(b, x, b.unshard(shards[name], name))
    fw = b.finish(x, *shards.values())
    b = GraphBuilder(specs)
    shards = {n: b.shard(n) for n in shapes}
    g = b.input("g", (TOKENS, HIDDEN))
    grads: dict[str, Node] = {}
    for name in reversed(shapes):
        w = b.unshard(shards[name], name)
        wide = b.call(aten.mm.default, g, b.call(aten.t.default, w))
        if not frozen:
            grad = b.call(aten.mm.default, b.call(aten.t.default, wide), g)
            grads[name] = b.reduce_grad(grad, name)
        g = b.call(aten.mm.default, wide, w)
    bw = b.finish(g, *(grads.get(n) for n in shapes))
    made = lower_pair(fw, bw, ctx, num_fwd_outputs=1, scheduled=scheduled, segmented=True)
    return {key: describe(gm, made.contexts[key]) for key, gm in made.graphs.items()}


def there_and_back(b: GraphBuilder, x: Node, w: Node) -> Node:
    wide = b.call(aten.mm.default, x, b.call(aten.t.default, w))
    return b.call(aten.mm.default, wide, w)


def machine(schedule: Schedule, **relative: float) -> Machine:
    """One on which compute takes a second, and each lane that many times as long (0.3 if not named)."""
    moved = dict.fromkeys(Lane, 0)
    for step in schedule.steps:
        moved[step.lane] += step.bytes * (WHERE.ranks_per_node if step.lane is Lane.INTER else 1)

    def link(lane: Lane) -> Link:
        share = relative.get(lane.value, 0.3)
        return Link(latency_s=0.0, bytes_per_s=max(moved[lane], 1) / share)

    return Machine(
        inter=link(Lane.INTER),
        intra=link(Lane.INTRA),
        h2d=link(Lane.H2D),
        d2h=link(Lane.D2H),
        flops_per_s=sum(s.flops for s in schedule.steps),
        memory_bytes_per_s=1e30,
    )


BALANCES = [
    {},
    {"inter": 0.8},
    {"inter": 1.0},
    {"inter": 3.0},
    {"intra": 1.0},
    {"intra": 2.0},
    {"h2d": 1.0},
    {"h2d": 2.0},
    {"d2h": 1.0},
    {"inter": 0.9, "intra": 0.9, "h2d": 0.9, "d2h": 0.9},
]


@pytest.mark.parametrize("balance", BALANCES, ids=str)
@pytest.mark.parametrize("key", [FORWARD, WARM, BACKWARD], ids=["forward", "warm", "backward"])
@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp", "zero3+ho_ring"])
def test_forty_layers_are_within_a_tenth_of_the_busiest_lane(
    strategy: str, key: tuple[Direction, Variant], balance: dict[str, float]
) -> None:
    schedules = gpt(40, strategy=strategy)
    if key not in schedules:
        pytest.skip("only a resident strategy has a warm forward")
    time = simulate(schedules[key], machine(schedules[key], **balance), WHERE.ranks_per_node)
    assert time.total_s <= 1.10 * time.bound_s


def test_a_frozen_backbone_is_hidden_behind_compute() -> None:
    for key in (WARM, BACKWARD):
        schedule = gpt(40, frozen=True)[key]
        time = simulate(schedule, machine(schedule, h2d=0.9, intra=0.9), WHERE.ranks_per_node)
        assert time.busy_s[Lane.INTER] == 0
        assert time.total_s <= 1.10 * time.bound_s


def test_just_in_time_is_not() -> None:
    """The control: what the bound would say of a graph that `schedule` has not seen."""
    schedule = gpt(40, scheduled=False)[BACKWARD]
    time = simulate(schedule, machine(schedule, inter=0.9, intra=0.9), WHERE.ranks_per_node)
    assert time.total_s > 1.5 * time.bound_s


def test_the_work_of_a_layer_is_counted() -> None:
    flops = sum(s.flops for s in gpt(2)[FORWARD].steps)
    weights = VOCABULARY * HIDDEN + 2 * 12 * HIDDEN * HIDDEN
    assert flops == 2 * (2 * TOKENS * weights)  # there and back
    kinds = {s.kind for s in gpt(2)[FORWARD].steps if s.flops}
    assert kinds == {Kind.COMPUTE}
