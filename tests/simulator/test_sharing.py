"""Fair shares of links: properties for any flows, and one flow that stands for several."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fcdp_compile.tools.simulator.sharing import Demand, Lane, LinkUse, Sharing

demands = st.builds(
    Demand,
    peak_bytes_per_s=st.sampled_from([1.0, 3.0, 7.0, 50.0]),
    uses=st.lists(
        st.builds(LinkUse, link=st.sampled_from(Lane), weight=st.sampled_from([0.5, 1.0, 4.0])),
        max_size=3,
        unique_by=lambda use: use.link,
    ).map(tuple),
)
capacities = st.fixed_dictionaries({link: st.sampled_from([2.0, 9.0, 40.0]) for link in Lane})


@given(demands=st.lists(demands, max_size=4), capacities=capacities)
def test_shares_are_fair(demands: list[Demand], capacities: dict[Lane, float]) -> None:
    """No link is over-full; a flow below its peak is on a full link on which no flow is faster."""
    speeds = Sharing(capacities).speeds(tuple(demands))
    rates = [s * d.peak_bytes_per_s for s, d in zip(speeds, demands, strict=True)]
    used = dict.fromkeys(Lane, 0.0)
    for rate, demand in zip(rates, demands, strict=True):
        for use in demand.uses:
            used[use.link] += use.weight * rate
    assert all(used[link] <= capacities[link] * (1 + 1e-9) for link in Lane)
    full = [link for link in Lane if used[link] >= capacities[link] * (1 - 1e-9)]
    on = {link: [i for i, d in enumerate(demands) if _uses(d, link)] for link in Lane}
    for i, speed in enumerate(speeds):
        assert 0 < speed <= 1
        if speed < 1:
            limits = [link for link in full if i in on[link]]
            assert any(rates[i] >= max(rates[j] for j in on[x]) * (1 - 1e-9) for x in limits)


def _uses(demand: Demand, link: Lane) -> bool:
    return any(use.link is link for use in demand.uses)


@given(
    demands=st.lists(demands, max_size=3), capacities=capacities, ranks=st.sampled_from([2, 3, 8])
)
def test_one_flow_may_stand_for_several(
    demands: list[Demand], capacities: dict[Lane, float], ranks: int
) -> None:
    folded = [
        Demand(
            peak_bytes_per_s=d.peak_bytes_per_s,
            uses=tuple(LinkUse(link=u.link, weight=u.weight * ranks) for u in d.uses),
        )
        for d in demands
    ]
    sharing = Sharing(capacities)
    once = sharing.speeds(tuple(folded))
    assert sharing.speeds(tuple(demands * ranks)) == pytest.approx(once * ranks, rel=1e-9)


def test_what_one_cannot_use_goes_to_the_others() -> None:
    def flow(peak: float) -> Demand:
        return Demand(peak_bytes_per_s=peak, uses=(LinkUse(link=Lane.H2D, weight=1.0),))

    sharing = Sharing({Lane.H2D: 12.0})
    assert sharing.speeds((flow(12.0),)) == (1.0,)
    assert sharing.speeds((flow(12.0), flow(12.0))) == (0.5, 0.5)
    assert sharing.speeds((flow(12.0), flow(2.0))) == (10 / 12, 1.0)
