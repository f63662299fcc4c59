"""Without shared links a step takes as long as its lanes one by one, to the last bit; with them, longer."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from builders_cluster import INTRA, Program, buckets_for, make_profile, make_schedule, schedules
from fcdp_compile.plan import Kind, Lane, Schedule
from fcdp_compile.plan.cost import Machine, Slot
from fcdp_compile.tools.simulator import Conditions, simulate, simulate_step

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 5))

INTRA_KINDS = (
    Kind.INTRA_ALL_GATHER,
    Kind.INTRA_OWN_ALL_GATHER,
    Kind.INTRA_REST_ALL_GATHER,
    Kind.INTRA_REDUCE_SCATTER,
    Kind.INTRA_GRAD_ALL_GATHER,
)

UNSHARED = (
    schedules(inner_bytes=0),
    schedules(without=INTRA_KINDS, inner_bytes=0),
    schedules(without=[*INTRA_KINDS]),
)
"""With one of: flat rings, collectives within a node, the model's own; two of them would share a link."""

LINKS = {"inter": 1.7e9, "intra": 3.1e9, "h2d": 0.9e9, "d2h": 1.3e9}


def times_alone(schedule: Schedule, machine: Machine, ranks_per_node: int) -> list[Slot]:
    """The times of steps that share no link, from scratch: lanes take their steps in turn."""
    now_s = 0.0
    free_s = dict.fromkeys(Lane, 0.0)
    slots: list[Slot] = []
    for step in schedule.steps:
        ready_s = max((slots[i].end_s for i in step.waits), default=0.0)
        cost_s = machine.time_s(step, ranks_per_node)
        if step.lane is Lane.COMPUTE:
            slots.append(Slot(start_s=now_s, end_s=max(now_s, ready_s) + cost_s))
            now_s = slots[-1].end_s
        else:
            start_s = max(now_s, ready_s, free_s[step.lane])
            slots.append(Slot(start_s=start_s, end_s=start_s + cost_s))
            free_s[step.lane] = slots[-1].end_s
    return slots


@given(schedule=st.one_of(*UNSHARED), size=SIZES, latency_s=st.sampled_from([0.0, 50e-6, 1e-3]))
def test_one_part_is_what_the_lanes_take(
    schedule: Schedule, size: tuple[int, int], latency_s: float
) -> None:
    nodes, ranks = size
    profile = make_profile(latency_s=latency_s, **LINKS)
    expected = simulate(schedule, profile.machine, ranks)
    assert list(expected.slots) == times_alone(schedule, profile.machine, ranks)
    step = simulate_step(
        [schedule],
        profile,
        nodes=nodes,
        ranks_per_node=ranks,
        buckets=buckets_for(nodes, ranks),
    )
    assert step.parts == (replace(expected, inner={}),)
    assert step.step_s == expected.total_s
    assert step.busy_s == expected.busy_s
    assert step.exposed_s == expected.exposed_s
    assert step.slowest.nodes == nodes


@given(
    schedule=schedules(inner_bytes=3 * 10**6),
    latency_s=st.sampled_from([0.0, 50e-6, 1e-3]),
)
def test_both_share_the_link_within_a_node_with_the_model(
    schedule: Schedule, latency_s: float
) -> None:
    profile = make_profile(latency_s=latency_s, **LINKS)
    expected = simulate(schedule, profile.machine, 2)
    (part,) = simulate_step(
        [schedule], profile, nodes=2, ranks_per_node=2, buckets=buckets_for(2, 2)
    ).parts
    for mine, other in zip(part.slots, expected.slots, strict=True):
        assert mine.start_s == pytest.approx(other.start_s, rel=1e-9, abs=1e-12)
        assert mine.end_s == pytest.approx(other.end_s, rel=1e-9, abs=1e-12)
    for lane in Lane:
        assert part.busy_s[lane] == pytest.approx(expected.busy_s[lane], abs=1e-12)
    sends = [s.index for s in schedule.steps if s.inner_bytes]
    assert list(expected.inner) == sends
    for index in sends:
        slot, inner = expected.slots[index], expected.inner[index]
        work_s = profile.machine.work_s(schedule.steps[index])
        assert slot.start_s + work_s / 2 <= inner.start_s + 1e-12
        assert inner.start_s < inner.end_s
        assert inner.end_s + work_s / 2 == pytest.approx(slot.end_s)


def test_what_the_model_sends_slows_gathers_and_they_slow_it() -> None:
    """5 ms and 1 ms of the link: from 2 ms on they meet for 2 ms, in which each moves for 1 ms."""
    program = Program()
    gather = program.add(Kind.INTRA_ALL_GATHER, bytes=round(5e-3 * INTRA))
    first = program.compute(0.004, inner_bytes=round(1e-3 * INTRA))
    alone = program.compute(0.001, program.wait(gather), inner_bytes=round(1e-3 * INTRA))
    time = simulate(program.schedule, make_profile().machine, 2)
    ends_ms = {i: 1e3 * time.slots[i].end_s for i in (gather, first, alone)}
    assert ends_ms == pytest.approx({gather: 6.0, first: 6.0, alone: 8.0})
    spans_ms = [(1e3 * s.start_s, 1e3 * s.end_s) for s in time.inner.values()]
    assert spans_ms == [pytest.approx((2.0, 4.0)), pytest.approx((6.5, 7.5))]
    assert time.inner_s == pytest.approx(0.003)
    assert time.busy_s[Lane.INTRA] == pytest.approx(0.006)


@given(pair=st.one_of(*(st.tuples(some, some) for some in UNSHARED)), nodes=st.integers(1, 4))
def test_lanes_run_on_from_part_to_part(pair: tuple[Schedule, Schedule], nodes: int) -> None:
    """Two parts take as long as one part with the steps of both."""
    first, second = pair
    offset = len(first.steps)
    later = [
        replace(s, index=s.index + offset, waits=tuple(w + offset for w in s.waits))
        for s in second.steps
    ]
    profile = make_profile(latency_s=1e-5, **LINKS)
    expected = simulate(make_schedule([*first.steps, *later]), profile.machine, 2)
    step = simulate_step(
        [first, second], profile, nodes=nodes, ranks_per_node=2, buckets=buckets_for(nodes, 2)
    )
    slots = [slot for part in step.parts for slot in part.slots]
    assert tuple(slots) == expected.slots
    assert step.step_s == expected.total_s


def test_a_reduction_runs_into_the_next_part() -> None:
    backward, forward = Program(), Program()
    reduction = backward.add(Kind.INTER_REDUCE_SCATTER, bytes=10**7)
    forward.compute(0.005)
    forward.compute(0.002, forward.add(Kind.INTER_ALL_GATHER, bytes=10**6))
    step = simulate_step(
        [backward.schedule, forward.schedule],
        make_profile(),
        nodes=2,
        ranks_per_node=1,
        buckets=buckets_for(2, 1),
    )
    first, second = step.parts
    assert first.slots[reduction].end_s == 0.01
    assert first.total_s == 0.0  # the program ends at once
    assert second.slots[1].start_s == 0.01  # the lane was taken
    assert step.step_s == second.total_s == 0.011 + 0.002
    assert step.exposed_s == 0.013 - 0.007


def test_parts_without_steps_take_no_time() -> None:
    program = Program()
    program.compute(0.005)
    empty = make_schedule([])
    step = simulate_step(
        [empty, program.schedule, empty], make_profile(), nodes=2, ranks_per_node=1, buckets={}
    )
    assert [part.total_s for part in step.parts] == [0.0, 0.005, 0.0]
    nothing = simulate_step([], make_profile(), nodes=2, ranks_per_node=1, buckets={})
    assert (nothing.step_s, nothing.parts) == (0.0, ())


def test_a_jitter_of_nothing_changes_nothing() -> None:
    """Control of the above: the same nodes as classes of their own."""
    program = Program()
    gathered = program.add(Kind.INTER_ALL_GATHER, bytes=10**6)
    program.compute(0.003, program.add(Kind.INTRA_ALL_GATHER, gathered, bytes=10**6))
    profile, buckets = make_profile(), buckets_for(3, 2)
    steps = [
        simulate_step(
            [program.schedule],
            profile,
            nodes=3,
            ranks_per_node=2,
            buckets=buckets,
            conditions=Conditions(jitter=jitter),
        )
        for jitter in (0.0, 1e-12)
    ]
    assert [len(step.classes) for step in steps] == [1, 3]
    assert abs(steps[0].step_s - steps[1].step_s) < 1e-12
    assert steps[0].busy_s[Lane.INTER] == steps[1].busy_s[Lane.INTER]
