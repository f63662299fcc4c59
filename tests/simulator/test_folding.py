"""One rank simulated for many takes as long as all ranks simulated one by one."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from builders_cluster import buckets_for, make_profile, schedules
from fcdp_compile.cluster.profile import ClusterProfile
from fcdp_compile.plan import Schedule
from fcdp_compile.tools.simulator import Conditions, simulate_step
from fcdp_compile.tools.simulator.engine import Engine
from fcdp_compile.tools.simulator.rings import Collectives
from fcdp_compile.tools.simulator.tasks import Cluster, tasks_of
from tests.simulator.every_rank import EveryRank, Node

SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (3, 4)]
FACTORS = (0.5, 1.0, 2.0)

profiles = st.builds(
    make_profile,
    ranks_per_host_link=st.sampled_from([1, 2, 4]),
    intra_over_host_link=st.booleans(),
    latency_s=st.sampled_from([0.0, 1e-4]),
    inter=st.sampled_from([1e9, 40e9]),
    intra=st.sampled_from([1e9, 4e9, 20e9]),
    h2d=st.sampled_from([2e9, 8e9]),
    d2h=st.sampled_from([3e9, 8e9]),
)


@settings(max_examples=300)
@given(
    schedule=schedules(),
    size=st.sampled_from(SIZES),
    profile=profiles,
    slowdown=st.sampled_from(FACTORS),
    inter_factor=st.sampled_from(FACTORS),
)
def test_folded_ranks_end_when_all_ranks_do(
    schedule: Schedule,
    size: tuple[int, int],
    profile: ClusterProfile,
    slowdown: float,
    inter_factor: float,
) -> None:
    nodes, g = size
    profile = replace(profile, ranks_per_host_link=min(g, profile.ranks_per_host_link))
    stragglers = ((1, slowdown),) if nodes > 1 else ()
    slow_links = ((1, inter_factor),) if nodes > 2 else ()
    step = simulate_step(
        [schedule],
        profile,
        nodes=nodes,
        ranks_per_node=g,
        buckets=buckets_for(nodes, g),
        conditions=Conditions(stragglers=stragglers, slow_links=slow_links),
    )
    speed = profile.machine.inter.bytes_per_s
    each = [Node(slowdown=s, inter=speed) for _, s in stragglers]
    each += [Node(slowdown=1.0, inter=speed * f) for _, f in slow_links]
    each += [Node(slowdown=1.0, inter=speed)] * (nodes - len(each))
    ends = EveryRank(schedule.steps, profile, each, g).run()
    last = max((end for rank in ends for end in rank.values()), default=0.0)
    assert step.step_s == pytest.approx(last, rel=1e-6, abs=1e-12)
    slowest = [
        rank
        for rank, node in zip(ends, [n for n in each for _ in range(g)], strict=True)
        if node.slowdown == step.slowest.slowdown
        and node.inter == speed * step.slowest.inter_factor
    ]
    (part,) = step.parts
    for rank in slowest:
        for i, slot in enumerate(part.slots):
            assert slot.end_s == pytest.approx(rank[i], rel=1e-6, abs=1e-12)


awkward = st.builds(
    make_profile,
    ranks_per_host_link=st.integers(1, 4),
    intra_over_host_link=st.just(value=True),
    latency_s=st.sampled_from([0.0, 1.3e-4]),
    inter=st.sampled_from([1.1e9, 37e9]),
    intra=st.sampled_from([1.3e9, 19e9]),
    h2d=st.sampled_from([1.7e9, 7.1e9]),
    d2h=st.sampled_from([2.3e9, 7.3e9]),
)
"""With figures whose sums and products are rounded."""


@settings(max_examples=300)
@given(
    schedule=schedules(parts=3),
    profile=awkward,
    collectives=st.sampled_from(Collectives),
    split=st.sampled_from([(4,), (1, 3), (1, 1, 2), (1, 1, 1, 1)]),
)
@pytest.mark.slow
def test_nodes_one_by_one_end_when_folded_ones_do(
    schedule: Schedule,
    profile: ClusterProfile,
    collectives: Collectives,
    split: tuple[int, ...],
) -> None:
    """To the last bit, however equal nodes are put into classes."""
    cluster = Cluster(
        machine=profile.machine,
        nodes=4,
        ranks_per_node=4,
        sharers=min(4, profile.ranks_per_host_link),
        intra_over_host_link=profile.intra_over_host_link,
    )
    tasks = tasks_of([schedule], cluster, collectives)
    runs = [
        Engine(tasks, cluster.sharing, longer_s=[[0.0] * len(tasks)] * len(counts)).run()
        for counts in ((4,), split)
    ]
    times = [[(r.start_s, r.end_s, r.busy_s) for r in ranks] for ranks in runs]
    assert times[1] == times[0] * len(split)
