"""Whole training steps: physical bounds, the optimizer, figures, and refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from builders_cluster import (
    BUS,
    FLOPS,
    INTER,
    MEMORY,
    Program,
    buckets_for,
    make_profile,
    schedules,
)
from fcdp_compile.cluster.profile import CLUSTERS, ClusterProfile
from fcdp_compile.plan import Kind, Lane, Schedule
from fcdp_compile.tools.simulator import Collectives, Conditions, SimulatedStep, simulate_step

MB = 10**6
MS = 1e-3

profiles = st.builds(
    make_profile,
    ranks_per_host_link=st.sampled_from([1, 2, 4]),
    intra_over_host_link=st.booleans(),
    latency_s=st.sampled_from([0.0, 1e-4]),
    inter=st.sampled_from([0.5e9, 40e9]),
    intra=st.sampled_from([1e9, 20e9]),
)

conditions = st.builds(
    Conditions,
    stragglers=st.sampled_from([(), ((1, 3.0),)]),
    slow_links=st.sampled_from([(), ((1, 0.5),)]),
    jitter=st.sampled_from([0.0, 0.2]),
)


def simulated(
    *parts: Schedule, profile: ClusterProfile | None = None, **more: Any
) -> SimulatedStep:
    """On 3 x 4 ranks."""
    return simulate_step(
        parts,
        profile or make_profile(),
        **{"nodes": 3, "ranks_per_node": 4, "buckets": buckets_for(3, 4), **more},
    )


@given(
    parts=st.lists(schedules(parts=2), min_size=1, max_size=3),
    profile=profiles,
    conditions=conditions,
    collectives=st.sampled_from(Collectives),
    optimizer_bytes=st.sampled_from([0, 10**8]),
)
def test_nothing_is_faster_than_its_links(
    parts: list[Schedule],
    profile: ClusterProfile,
    conditions: Conditions,
    collectives: Collectives,
    optimizer_bytes: int,
) -> None:
    step = simulated(
        *parts,
        profile=profile,
        conditions=conditions,
        collectives=collectives,
        optimizer_bytes=optimizer_bytes,
    )
    enough_s, machine, steps = step.step_s * (1 + 1e-9), profile.machine, _steps(parts)
    slowest_card = machine.inter.bytes_per_s * (0.5 if conditions.slow_links else 1.0)
    assert step.bytes_sent_by_node / slowest_card <= enough_s
    for lane, link in ((Lane.H2D, machine.h2d), (Lane.D2H, machine.d2h)):
        copied = profile.ranks_per_host_link * sum(s.bytes for s in steps if s.lane is lane)
        assert copied / link.bytes_per_s <= enough_s
    if collectives is Collectives.HIERARCHICAL:
        within = sum(s.bytes for s in steps if s.lane is Lane.INTRA)
        assert within / machine.intra.bytes_per_s <= enough_s
        over_bus = within if profile.intra_over_host_link else 0
        loaded = sum(s.bytes for s in steps if s.lane is Lane.H2D)
        switch = profile.ranks_per_host_link * (over_bus + loaded)
        assert switch / machine.h2d.bytes_per_s <= enough_s
        sent = sum(s.bytes * 4 for s in steps if s.lane is Lane.INTER)
        assert step.bytes_sent_by_node == sent
    for nodes in step.classes:
        assert all(0 <= busy <= nodes.end_s * (1 + 1e-9) for busy in nodes.busy_s.values())
        assert nodes.exposed_s >= -1e-12
        assert nodes.end_s <= step.step_s
    _check_slots(step, parts)


def _steps(parts: list[Schedule]) -> list[Any]:
    return [s for part in parts for s in part.steps]


def _check_slots(step: SimulatedStep, parts: list[Schedule]) -> None:
    """A lane runs one step at a time, in order, and each step after the steps it waits for."""
    free_s = dict.fromkeys(Lane, 0.0)
    for part, timeline in zip(parts, step.parts, strict=True):
        for s, slot in zip(part.steps, timeline.slots, strict=True):
            assert free_s[s.lane] <= slot.start_s <= slot.end_s
            ready_s = max((timeline.slots[w].end_s for w in s.waits), default=0.0)
            assert ready_s <= (slot.end_s if s.lane is Lane.COMPUTE else slot.start_s)
            free_s[s.lane] = slot.end_s


def two_layers() -> Schedule:
    program = Program()
    for _ in range(2):
        gathered = program.add(Kind.INTER_ALL_GATHER, bytes=6 * MB)
        loaded = program.add(Kind.LOAD, bytes=8 * MB)
        spread = program.add(Kind.INTRA_ALL_GATHER, gathered, loaded, bytes=16 * MB)
        program.compute(3 * MS, program.wait(spread))
        program.add(Kind.STORE, gathered, bytes=8 * MB)
        reduced = program.add(Kind.INTRA_REDUCE_SCATTER, bytes=16 * MB)
        program.add(Kind.INTER_REDUCE_SCATTER, reduced, bytes=6 * MB)
    return program.schedule


@pytest.mark.parametrize("link", ["inter", "intra", "h2d", "d2h"])
@pytest.mark.parametrize("over_bus", [False, True])
@pytest.mark.parametrize("collectives", Collectives)
def test_more_bandwidth_is_never_slower(
    link: str, over_bus: bool, collectives: Collectives
) -> None:
    """For these schedules; with others, more bandwidth can make lanes wait longer for each other."""
    times = [
        simulated(
            two_layers(),
            profile=make_profile(intra_over_host_link=over_bus, **{link: speed * 1e9}),
            collectives=collectives,
        ).step_s
        for speed in (0.25, 0.5, 1, 2, 4, 8, 16)
    ]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(times))
    hidden = collectives is Collectives.RING and not over_bus and link in ("h2d", "d2h")
    assert (times[0] > times[-1]) == (not hidden)


def test_the_built_in_clusters_differ_by_their_network() -> None:
    times = [
        simulated(two_layers(), profile=CLUSTERS[f"a40x8-{network}"]).step_s
        for network in ("100g-rdma", "100g-ipoib", "10gbe", "1gbe")
    ]
    assert times == sorted(times)
    assert times[-1] > 20 * times[0]


def test_the_optimizer_starts_when_all_gradients_are_there() -> None:
    """A reduction until 24 ms, a store until 40 ms, an optimizer of 10 ms."""
    program = Program()
    program.compute(2 * MS)
    program.add(Kind.INTER_REDUCE_SCATTER, bytes=6 * MB)
    program.add(Kind.STORE, bytes=round(38 * MS * BUS))
    size = round(10 * MS * MEMORY)
    step = simulated(program.schedule, optimizer_bytes=size)
    assert step.optimizer_s == pytest.approx(10 * MS)
    assert step.step_s == pytest.approx(40 * MS)
    assert step.busy_s[Lane.COMPUTE] == pytest.approx(12 * MS)
    assert step.parts[0].busy_s[Lane.COMPUTE] == pytest.approx(2 * MS)
    longer = simulated(program.schedule, optimizer_bytes=2 * size)
    assert longer.step_s == pytest.approx((2 + 24 + 20) * MS)
    assert longer.parts == step.parts
    slow = Conditions(stragglers=((1, 2.0),))
    slower = simulated(program.schedule, optimizer_bytes=2 * size, conditions=slow)
    assert slower.optimizer_s == pytest.approx(40 * MS)
    assert slower.step_s == pytest.approx((4 + 24 + 40) * MS)


def test_figures_of_a_step() -> None:
    """The link between nodes is busy for 24 ms of 34; compute is idle for 26 ms."""
    forward, backward = Program(), Program()
    gathered = forward.add(Kind.INTER_ALL_GATHER, bytes=6 * MB)
    forward.compute(8 * MS, forward.wait(gathered))
    backward.wait(backward.add(Kind.LOAD, bytes=8 * MB))
    step = simulated(forward.schedule, backward.schedule)
    first, second = step.parts
    assert (first.total_s, second.total_s) == pytest.approx((32 * MS, 2 * MS))
    assert (first.exposed_s, second.exposed_s) == pytest.approx((24 * MS, 2 * MS))
    assert step.step_s == pytest.approx(34 * MS)
    assert step.exposed_s == pytest.approx(26 * MS)
    assert step.bytes_sent_by_node == 4 * 6 * MB
    assert step.classes == (step.slowest,)
    assert second.slots[0].start_s == pytest.approx(32 * MS)  # from the beginning of the step


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "nodes is 0, but must be at least 1"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"ranks_per_node": 65}, "ranks_per_node is 65, but a node of 'by hand' has 1 to 64"),
        ({"nodes": 5}, "bucket 0 is cut over 3 x 4 ranks, but 5 x 4 are simulated"),
        ({"ranks_per_node": 8}, "bucket 0 is cut over 3 x 4 ranks, but 3 x 8 are simulated"),
        ({"buckets": {}}, "of bucket 0, which is not among the buckets"),
        ({"optimizer_bytes": -1}, "optimizer_bytes is -1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulated(two_layers(), **arguments)


@pytest.mark.parametrize("late", [0, 1, 7, -1])
def test_a_step_that_waits_for_a_later_one_is_refused(late: int) -> None:
    schedule = two_layers()
    steps = [replace(schedule.steps[0], waits=(late,)), *schedule.steps[1:]]
    with pytest.raises(ValueError, match=f"waits for step {late}, which does not come before it"):
        simulated(replace(schedule, steps=tuple(steps)))


def test_the_figures_of_the_builder() -> None:
    """Control: the figures from which the times above are computed."""
    assert (INTER, BUS, FLOPS, MEMORY) == (1e9, 4e9, 1e12, 100e9)
