"""HO-Ring and the hierarchical collectives on simulated lanes: equal bytes, and equal times in a row."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.gathering import LAYERS, RANKS_PER_NODE, _add_gather, _add_reduction, schedule_of
from fcdp_compile.plan import Lane, Schedule
from fcdp_compile.plan.cost import MACHINES, Link, Machine
from fcdp_compile.strategy import Algorithm
from fcdp_compile.tools.simulator import simulate

BOTH = (Algorithm.HIERARCHICAL, Algorithm.HO_RING)


def _bytes(schedule: Schedule) -> Counter[Lane]:
    found: Counter[Lane] = Counter()
    for step in schedule.steps:
        found[step.lane] += step.bytes
    return found


def _machine(inter_bytes_per_s: float, intra_bytes_per_s: float) -> Machine:
    base = MACHINES["cuda"]
    return Machine(
        inter=Link(latency_s=base.inter.latency_s, bytes_per_s=inter_bytes_per_s),
        intra=Link(latency_s=base.intra.latency_s, bytes_per_s=intra_bytes_per_s),
        h2d=base.h2d,
        d2h=base.d2h,
        flops_per_s=base.flops_per_s,
        memory_bytes_per_s=base.memory_bytes_per_s,
    )


@pytest.mark.parametrize("add", [_add_gather, _add_reduction])
def test_every_link_carries_the_same_bytes(add):  # type: ignore[no-untyped-def]
    hierarchical, ho_ring = (_bytes(schedule_of(add, a, 3)) for a in BOTH)
    assert hierarchical == ho_ring
    assert hierarchical[Lane.INTRA] > 0 < hierarchical[Lane.INTER]


@pytest.mark.parametrize("intra_bytes_per_s", [20e9, 200e9])
@pytest.mark.parametrize("inter_bytes_per_s", [1.25e9, 12.5e9])
def test_in_a_row_lanes_overlap_what_ho_ring_overlaps(
    inter_bytes_per_s: float, intra_bytes_per_s: float
) -> None:
    """Up to 100 Gbit/s a row takes equal time with both, as the links between nodes are never idle.

    Alone, HO-Ring's reduce-scatter sends to other nodes while the node's own part is summed, so it can save
    up to 1/N of the time within the node.  This is the control: the model does see the overlap.
    """
    machine = _machine(inter_bytes_per_s, intra_bytes_per_s)
    for add in (_add_gather, _add_reduction):
        for layers, least in ((LAYERS, 0.998), (1, 0.9)):
            times = [
                simulate(schedule_of(add, a, layers), machine, RANKS_PER_NODE).total_s for a in BOTH
            ]
            assert least <= times[1] / times[0] <= (1.002 if layers > 1 else 1.02), (add, layers)
    if intra_bytes_per_s == 20e9:
        alone = [
            simulate(schedule_of(_add_reduction, a, 1), machine, RANKS_PER_NODE).total_s
            for a in BOTH
        ]
        assert alone[1] < alone[0], "the control"
