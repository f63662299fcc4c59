"""Collectives between nodes, as planned and as flat rings: exact bytes, and times."""

from __future__ import annotations

from functools import cache

import pytest

from builders_cluster import Program, buckets_for, make_profile
from builders_graph import (
    Where,
    lower_pair,
    make_context,
    make_specs,
    toy_backward,
    toy_forward,
)
from builders_plan import make_bucket
from fcdp_compile.passes.describe import describe
from fcdp_compile.plan import Bucket, Direction, Kind, Lane, Schedule, Step, Variant
from fcdp_compile.plan.kinds import INTER_KINDS
from fcdp_compile.strategy import PRESETS, Scope, Strategy
from fcdp_compile.tools.simulator import Collectives, SimulatedStep, simulate_step

NODES, RANKS = 3, 2
G = NODES * RANKS
SHAPES = {"w": (25, 3), "b": (3,), "s": ()}  # nothing divides by 6
FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
STRATEGIES = [*PRESETS, "fcdp+w8+g4", "fcdp+ho_ring", "zero3+ho_ring"]


@cache
def planned(
    strategy: str,
) -> tuple[dict[tuple[Direction, Variant], Schedule], dict[int, Bucket]]:
    """The schedules of the toy model and their buckets."""
    home = Strategy.parse(strategy).home
    where = Where(nodes=NODES, ranks_per_node=RANKS)
    cut = Where(
        nodes=NODES if home is Scope.GLOBAL else 1,
        ranks_per_node=1 if home is Scope.NONE else RANKS,
    )
    specs = make_specs(SHAPES, cut)
    ctx = make_context(specs, where, strategy=strategy, bucket_bytes=64)
    forward, backward = toy_forward(specs), toy_backward(specs)
    made = lower_pair(forward, backward, ctx, num_fwd_outputs=1, scheduled=True, segmented=True)
    schedules = {key: describe(gm, made.contexts[key]) for key, gm in made.graphs.items()}
    return schedules, made.buckets


def simulated(
    strategy: str, key: tuple[Direction, Variant], collectives: Collectives
) -> SimulatedStep:
    schedules, buckets = planned(strategy)
    return simulate_step(
        [schedules[key]],
        make_profile(latency_s=1e-5),
        nodes=NODES,
        ranks_per_node=RANKS,
        buckets=buckets,
        collectives=collectives,
    )


def parts_of(step: Step, bucket: Bucket) -> tuple[int, int]:
    """The number of parts that each rank sends to each other rank in a collective, and a part's bytes."""
    if step.kind is Kind.INTER_ALL_GATHER:
        return 1, bucket.wire_bytes
    if step.kind is Kind.INTER_REDUCE_SCATTER:
        bits = 4 if "g4" in bucket.strategy.name else 8 * bucket.reduce_itemsize
        slots = [p.layout.slot_elements for p in bucket.params]
        scales = sum(-(-slot // 64) * 2 for slot in slots) if bits == 4 else 0
        return 1, scales + -(-sum(slots) * bits // 8)
    assert step.kind is Kind.INTER_ALL_REDUCE
    shard = bucket.slot_elements  # split over the ranks of a node
    if bucket.strategy.home is Scope.NONE:
        shard = -(-shard // RANKS)
    return 2, -(-shard // NODES) * bucket.reduce_itemsize


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_card_sends_what_the_formulas_say(strategy: str) -> None:
    """A card sends g*(N-1) parts of a bucket with two levels, and G-1 parts as a ring."""
    schedules, buckets = planned(strategy)
    for key, schedule in schedules.items():
        hierarchical = ring = 0
        for step in schedule.steps:
            if step.lane is Lane.INTER:
                count, part_bytes = parts_of(step, buckets[step.bucket or 0])
                hierarchical += RANKS * (NODES - 1) * count * part_bytes
                ring += (G - 1) * count * part_bytes
        two_levels = simulated(strategy, key, Collectives.HIERARCHICAL)
        assert two_levels.bytes_sent_by_node == hierarchical
        assert simulated(strategy, key, Collectives.RING).bytes_sent_by_node == ring


def test_formulas_meet_every_kind_between_nodes() -> None:
    """Control of the above."""
    kinds = {
        step.kind
        for strategy in STRATEGIES
        for schedule in planned(strategy)[0].values()
        for step in schedule.steps
        if step.lane is Lane.INTER
    }
    assert kinds == set(INTER_KINDS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_within_a_node_are_part_of_a_ring_or_its_own(strategy: str) -> None:
    """A ring replaces the steps within a node that belong to a step between nodes; other steps stay."""
    for key in planned(strategy)[0]:
        _check_within(strategy, key)


def _check_within(strategy: str, key: tuple[Direction, Variant]) -> None:
    steps = planned(strategy)[0][key].steps
    as_planned = simulated(strategy, key, Collectives.HIERARCHICAL).parts[0].slots
    as_rings = simulated(strategy, key, Collectives.RING).parts[0].slots
    crossing = {
        (s.bucket, "gather" in s.kind.value)
        for s in steps
        if s.kind in (Kind.INTER_ALL_GATHER, Kind.INTER_REDUCE_SCATTER)
    }
    all_reduced = {s.bucket for s in steps if s.kind is Kind.INTER_ALL_REDUCE}
    within = [s for s in steps if s.lane is Lane.INTRA and s.bytes]
    for step in within:
        is_gather = "gather" in step.kind.value
        is_part = (step.bucket, is_gather) in crossing
        if step.bucket in all_reduced:  # only gradients: a gather of parameters stays apart
            is_part = step.kind is not Kind.INTRA_ALL_GATHER
        took = [
            slots[step.index].end_s - slots[step.index].start_s for slots in (as_planned, as_rings)
        ]
        assert took[0] > 0
        assert (took[1] == 0) == is_part, step


def one_bucket() -> Bucket:
    return make_bucket(0, [("w", (4096, 4096))], nodes=4, ranks_per_node=8, dtype=("bfloat16", 2))


def gather_of(bucket: Bucket) -> Schedule:
    program = Program()
    sent = (bucket.nodes - 1) * bucket.wire_bytes
    gathered = program.add(Kind.INTER_ALL_GATHER, bytes=sent)
    sent = (bucket.ranks_per_node - 1) * bucket.node_bytes
    program.wait(program.add(Kind.INTRA_ALL_GATHER, gathered, bytes=sent))
    return program.schedule


@pytest.mark.parametrize("intra", [0.5e9, 8e9])
@pytest.mark.parametrize("latency_s", [0.0, 1e-3])
def test_how_long_a_gather_takes(intra: float, latency_s: float) -> None:
    """On 4 nodes of 8: 8 * 3 parts cross a card, then 7 * 4 parts move within; or 31 parts over both."""
    bucket, profile = one_bucket(), make_profile(intra=intra, latency_s=latency_s)
    machine, part = profile.machine, bucket.wire_bytes
    crossing, within = machine.inter.time_s(24 * part), machine.intra.time_s(28 * part)
    ring = max(machine.inter.time_s(31 * part), machine.intra.time_s(31 * part))
    for collectives, expected in (
        (Collectives.HIERARCHICAL, crossing + within),
        (Collectives.RING, ring + (31 / 3 - 1) * machine.inter.latency_s),
    ):
        step = simulate_step(
            [gather_of(bucket)],
            profile,
            nodes=4,
            ranks_per_node=8,
            buckets={0: bucket},
            collectives=collectives,
        )
        assert step.step_s == pytest.approx(expected, rel=1e-12)


def test_rings_take_the_links_within_a_node_too() -> None:
    """31 parts cross a card and each rank's link; a gather within the node gets half of that link."""
    bucket = one_bucket()
    ring = Program([*gather_of(bucket).steps[:1]])
    ring.add(Kind.INTRA_ALL_GATHER, bytes=31 * bucket.wire_bytes)
    steps = [
        simulate_step(
            [ring.schedule],
            make_profile(inter=1e9, intra=1e9),
            nodes=4,
            ranks_per_node=8,
            buckets={0: bucket},
            collectives=collectives,
        )
        for collectives in Collectives
    ]
    part_s = bucket.wire_bytes / 1e9
    assert steps[0].step_s == pytest.approx(31 * part_s)  # 24 parts over the card meanwhile
    assert steps[1].step_s == pytest.approx(62 * part_s)


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 4), (4, 1)])
def test_a_ring_over_one_level_is_what_was_planned(nodes: int, ranks: int) -> None:
    program = Program()
    gathered = program.add(Kind.INTER_ALL_GATHER, bytes=3 * 10**6 if nodes > 1 else 0)
    program.add(Kind.INTRA_ALL_GATHER, gathered, bytes=10**6 if ranks > 1 else 0)
    steps = [
        simulate_step(
            [program.schedule],
            make_profile(latency_s=1e-3),
            nodes=nodes,
            ranks_per_node=ranks,
            buckets=buckets_for(nodes, ranks),
            collectives=collectives,
        )
        for collectives in Collectives
    ]
    assert steps[0] == steps[1]
    assert steps[0].step_s > 0


def test_a_step_for_another_number_of_nodes_is_refused() -> None:
    program = Program()
    program.add(Kind.INTER_ALL_GATHER, bytes=100)
    with pytest.raises(ValueError, match="sends 100 bytes, which are not 3 equal parts"):
        simulate_step(
            [program.schedule],
            make_profile(),
            nodes=4,
            ranks_per_node=2,
            buckets=buckets_for(4, 2),
            collectives=Collectives.RING,
        )
