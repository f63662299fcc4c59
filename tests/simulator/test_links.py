"""Steps that share links: loads, stores and gathers of the ranks at one switch, worked out by hand."""

from __future__ import annotations

import pytest

from builders_cluster import BUS, Program, buckets_for, make_profile
from fcdp_compile.cluster.profile import ClusterProfile
from fcdp_compile.plan import Kind, Lane
from fcdp_compile.tools.simulator import Collectives, Conditions, SimulatedStep, simulate_step

MB = 10**6
MS = 1e-3


def simulated(program: Program, profile: ClusterProfile, *, ranks: int = 2) -> SimulatedStep:
    return simulate_step(
        [program.schedule],
        profile,
        nodes=2,
        ranks_per_node=ranks,
        buckets=buckets_for(2, ranks),
    )


def ends_ms(step: SimulatedStep) -> list[float]:
    return [1e3 * slot.end_s for slot in step.parts[0].slots]


@pytest.mark.parametrize(("kind", "lane"), [(Kind.LOAD, Lane.H2D), (Kind.STORE, Lane.D2H)])
def test_two_ranks_at_a_switch_load_at_half_the_speed(kind: Kind, lane: Lane) -> None:
    program = Program()
    program.add(kind, bytes=20 * MB)
    own = simulated(program, make_profile(latency_s=MS))
    shared = simulated(program, make_profile(latency_s=MS, ranks_per_host_link=2))
    assert own.step_s == pytest.approx(MS + 20 * MB / BUS)
    assert shared.step_s == pytest.approx(MS + 20 * MB / (BUS / 2))  # latencies are not shared
    assert shared.busy_s[lane] == shared.step_s
    alone = simulated(program, make_profile(latency_s=MS, ranks_per_host_link=2), ranks=1)
    assert alone.step_s == own.step_s


def test_both_directions_are_links_of_their_own() -> None:
    program = Program()
    program.add(Kind.LOAD, bytes=20 * MB)
    program.add(Kind.STORE, bytes=20 * MB)
    assert ends_ms(simulated(program, make_profile())) == [5.0, 5.0]


def test_loads_and_gathers_contend_for_the_bus() -> None:
    """4 GB/s: a load of 20 MB from 0 ms, a gather of 12 MB from 1 ms; both at half the speed until 7 ms."""
    program = Program()
    program.add(Kind.LOAD, bytes=20 * MB)
    program.compute(1 * MS)
    program.add(Kind.INTRA_ALL_GATHER, bytes=12 * MB)
    over_bus = make_profile(intra=BUS, intra_over_host_link=True)
    step = simulated(program, over_bus)
    assert ends_ms(step) == pytest.approx([8.0, 1.0, 7.0])
    assert step.busy_s[Lane.H2D] == pytest.approx(8 * MS)
    assert step.busy_s[Lane.INTRA] == pytest.approx(6 * MS)
    assert ends_ms(simulated(program, make_profile(intra=BUS))) == pytest.approx([5.0, 1.0, 4.0])


def test_a_gather_over_the_bus_takes_both_directions_of_it() -> None:
    program = Program()
    for kind in (Kind.STORE, Kind.LOAD, Kind.INTRA_ALL_GATHER):
        program.add(kind, bytes=8 * MB)
    assert ends_ms(simulated(program, make_profile(intra=BUS, intra_over_host_link=True))) == (
        pytest.approx([4.0, 4.0, 4.0])
    )


def test_what_the_model_sends_over_the_bus_contends_with_loads() -> None:
    """From 1 ms on both at half the speed for 2 ms; operators of stragglers take longer, transfers do not."""
    program = Program()
    program.add(Kind.LOAD, bytes=round(3 * MS * BUS))
    program.compute(2 * MS, inner_bytes=round(1 * MS * BUS))
    over_bus = make_profile(intra=BUS, intra_over_host_link=True)
    assert ends_ms(simulated(program, over_bus)) == pytest.approx([4.0, 4.0])
    slow = simulate_step(
        [program.schedule],
        over_bus,
        nodes=2,
        ranks_per_node=2,
        buckets=buckets_for(2, 2),
        conditions=Conditions(stragglers=((2, 2.0),)),
    )
    assert ends_ms(slow) == pytest.approx([4.0, 6.0])


def test_a_bus_that_is_slower_than_the_link_within_sets_the_pace() -> None:
    program = Program()
    program.add(Kind.INTRA_ALL_GATHER, bytes=8 * MB)
    step = simulated(program, make_profile(intra=8e9, h2d=2e9, intra_over_host_link=True))
    assert ends_ms(step) == [4.0]


def test_putting_parts_in_order_takes_no_link() -> None:
    """4 ms of transfer, 10 ms of copying: a load during the copying has the whole bus."""
    program = Program()
    program.add(Kind.INTRA_REST_ALL_GATHER, bytes=16 * MB, accessed_bytes=10**9)
    program.compute(5 * MS)
    program.add(Kind.LOAD, bytes=16 * MB)
    step = simulated(program, make_profile(intra=BUS, intra_over_host_link=True))
    assert ends_ms(step) == pytest.approx([14.0, 5.0, 9.0])


def test_a_collective_of_all_nodes_is_as_fast_as_the_fullest_bus_lets_it() -> None:
    """A ring of 15 parts takes 15 ms alone; loads of 4 ms, one on each class of nodes, halve its speed."""
    program = Program()
    program.add(Kind.INTER_ALL_GATHER, bytes=28 * MB)
    program.add(Kind.LOAD, program.compute(2 * MS), bytes=8 * MB)
    step = simulate_step(
        [program.schedule],
        make_profile(inter=BUS, intra=BUS, intra_over_host_link=True),
        nodes=8,
        ranks_per_node=2,
        buckets=buckets_for(8, 2),
        conditions=Conditions(stragglers=((1, 4.0),)),
        collectives=Collectives.RING,
    )
    assert ends_ms(step) == pytest.approx([19.0, 8.0, 12.0])
    straggler, others = step.classes
    assert straggler.busy_s[Lane.H2D] == pytest.approx(4 * MS)
    assert others.busy_s[Lane.H2D] == pytest.approx(4 * MS)
    assert others.end_s == pytest.approx(19 * MS)
