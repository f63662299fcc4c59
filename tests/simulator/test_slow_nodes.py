"""The effect of stragglers, slow links and jitter on a step."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from builders_cluster import INTER, Program, buckets_for, make_profile
from fcdp_compile.plan import Kind, Lane
from fcdp_compile.tools.simulator import Conditions, SimulatedStep, simulate_step

MB = 10**6
MS = 1e-3


def layers(count: int = 4) -> Program:
    """Layers of 3 ms; each needs a gather of 8 MB per node between nodes, started one layer ahead."""
    program = Program()
    gathered = program.add(Kind.INTER_ALL_GATHER, bytes=2 * MB)
    for _ in range(count):
        ahead = program.add(Kind.INTER_ALL_GATHER, bytes=2 * MB)
        program.compute(3 * MS, program.wait(gathered))
        gathered = ahead
    return program


def simulated(conditions: Conditions, *, nodes: int = 8, **profile: Any) -> SimulatedStep:
    return simulate_step(
        [layers().schedule],
        make_profile(**profile),
        nodes=nodes,
        ranks_per_node=4,
        buckets=buckets_for(nodes, 4),
        conditions=conditions,
    )


def test_one_slow_node_slows_all() -> None:
    """A gather of 8 ms begins when the slowest node is ready; the others finish the last layer sooner."""
    fast = simulated(Conditions())
    slow = simulated(Conditions(stragglers=((1, 5.0),)))
    assert fast.step_s == pytest.approx((5 * 8) * MS)
    # 8 ms, then four layers of 15 ms, gathers hidden.
    assert slow.step_s == pytest.approx((8 + 4 * 15) * MS)
    straggler, others = slow.classes
    assert (straggler.nodes, others.nodes) == (1, 7)
    assert slow.slowest == straggler
    assert straggler.end_s == slow.step_s
    # Before the last gather, the others wait for the straggler's third layer.
    assert others.end_s == pytest.approx((8 + 3 * 15 + 8) * MS)
    assert others.busy_s[Lane.COMPUTE] == pytest.approx(12 * MS)
    assert straggler.busy_s[Lane.INTER] == others.busy_s[Lane.INTER] == pytest.approx(40 * MS)
    assert others.exposed_s > straggler.exposed_s


def test_all_nodes_slow_is_a_slow_machine() -> None:
    step = simulated(Conditions(stragglers=((8, 5.0),)))
    assert len(step.classes) == 1
    assert step.step_s == pytest.approx((8 + 4 * 15) * MS)


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_one_slow_card_slows_every_gather(factor: float) -> None:
    one = simulated(Conditions(slow_links=((1, factor),)))
    assert one.step_s == simulated(Conditions(), inter=INTER * factor).step_s


def test_a_fast_card_among_others_gains_nothing_and_fast_cards_do() -> None:
    assert simulated(Conditions(slow_links=((1, 2.0),))).step_s == simulated(Conditions()).step_s
    faster = simulated(Conditions(slow_links=((8, 2.0),)))
    assert faster.step_s == simulated(Conditions(), inter=2 * INTER).step_s


def test_a_seed_is_a_step_and_another_is_another() -> None:
    first, again, other = (
        simulated(Conditions(jitter=0.3, seed=seed), inter=1e15) for seed in (1, 1, 2)
    )
    assert first == again
    assert first.step_s != other.step_s
    assert [c.nodes for c in first.classes] == [1] * 8
    assert len({c.busy_s[Lane.COMPUTE] for c in first.classes}) == 8


def test_with_jitter_a_step_takes_longer_as_nodes_wait_for_each_other() -> None:
    """With a fast network compute, 4 x 3 ms, is the bound; waits for other nodes come on top."""
    exact = simulated(Conditions(), inter=1e15)
    jittered = [simulated(Conditions(jitter=0.3, seed=s), inter=1e15) for s in range(20)]
    assert exact.step_s == pytest.approx(12 * MS)
    assert statistics.mean(step.step_s for step in jittered) > 1.1 * exact.step_s
    for step in jittered:
        assert step.step_s >= max(c.busy_s[Lane.COMPUTE] for c in step.classes)
