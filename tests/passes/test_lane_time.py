"""The times of schedules on simulated lanes: how much of the transfers compute does not hide.

    time of the schedule / max(compute, inter, intra, H2D, D2H)

No order of the same steps is faster than its busiest lane.
"""

from __future__ import annotations

import pytest

from builders_gpt import HIDDEN, TOKENS, VOCABULARY, WHERE, gpt
from fcdp_compile.plan import Direction, Kind, Lane, Schedule, Variant
from fcdp_compile.plan.cost import Link, Machine, Timeline
from fcdp_compile.tools.simulator import simulate
from tests.marks import quick

FORWARD = (Direction.FORWARD, Variant.COLD)
WARM = (Direction.FORWARD, Variant.WARM)
BACKWARD = (Direction.BACKWARD, Variant.COLD)


def machine(schedule: Schedule, **relative: float) -> Machine:
    """A machine on which compute takes a second, and each lane `relative` seconds (0.3 if not named)."""
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


def busiest_s(time: Timeline) -> float:
    """The time of the busiest lane, a lower bound for any order of the steps."""
    return max(time.busy_s.values())


@pytest.mark.parametrize("balance", quick(BALANCES, *BALANCES[::3]), ids=str)
@pytest.mark.parametrize("key", [FORWARD, WARM, BACKWARD], ids=["forward", "warm", "backward"])
@pytest.mark.parametrize("strategy", quick(["zero3", "zero++", "fcdp", "zero3+ho_ring"], "fcdp"))
def test_forty_layers_are_within_a_tenth_of_the_busiest_lane(
    strategy: str, key: tuple[Direction, Variant], balance: dict[str, float]
) -> None:
    schedules = gpt(40, strategy=strategy)
    if key not in schedules:
        pytest.skip("only a resident strategy has a warm forward")
    time = simulate(schedules[key], machine(schedules[key], **balance), WHERE.ranks_per_node)
    assert time.total_s <= 1.10 * busiest_s(time)


def test_a_frozen_backbone_is_hidden_behind_compute() -> None:
    for key in (WARM, BACKWARD):
        schedule = gpt(40, frozen=True)[key]
        time = simulate(schedule, machine(schedule, h2d=0.9, intra=0.9), WHERE.ranks_per_node)
        assert time.busy_s[Lane.INTER] == 0
        assert time.total_s <= 1.10 * busiest_s(time)


@pytest.mark.slow
def test_just_in_time_is_not() -> None:
    """The control: a graph without `schedule` exceeds the bound."""
    schedule = gpt(40, scheduled=False)[BACKWARD]
    time = simulate(schedule, machine(schedule, inter=0.9, intra=0.9), WHERE.ranks_per_node)
    assert time.total_s > 1.5 * busiest_s(time)


def test_the_work_of_a_layer_is_counted() -> None:
    flops = sum(s.flops for s in gpt(2)[FORWARD].steps)
    weights = VOCABULARY * HIDDEN + 2 * 12 * HIDDEN * HIDDEN
    assert flops == 2 * (2 * TOKENS * weights)  # forward and backward
    kinds = {s.kind for s in gpt(2)[FORWARD].steps if s.flops}
    assert kinds == {Kind.COMPUTE}
