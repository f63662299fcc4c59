"""The speeds of flows that use the same links at the same time; a flow is treated as a fluid.

[Note: fair shares]
Flows on a link get equal bytes/s, and a share that a flow cannot use goes to the others: the rates of all
flows rise together; a flow stops rising at its peak, and when a link is full, all flows on it stop rising
(max-min fairness, by progressive filling).  So a flow over several links gets the least of its shares.  A
flow that represents several ranks in step ([Note: folding]) counts on a link once for each of its ranks
there, and moves at the share of one.

Source: Bertsekas and Gallager, Data Networks (1992), section 6.5.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fcdp_compile.plan import Lane


class LinkUse(NamedTuple):
    """A link that a flow uses, by its lane; weight: bytes over the link for each byte of the flow.

    A link is one rank's, or that of the ranks at one switch; steps of different lanes may use it.
    """

    link: Lane
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The links that a flow uses; peak_bytes_per_s: the flow's speed if no other flow is in its way."""

    peak_bytes_per_s: float
    uses: tuple[LinkUse, ...]


_SAME = 1 + 1e-9
"""Rates that differ by less than this factor count as equal, so that rounding slows no flow down."""


class Sharing:
    """The shares of one rank's links.

    capacities: in bytes/s.
    """

    def __init__(self, capacities: Mapping[Lane, float]) -> None:
        self._capacities = capacities
        self._known: dict[tuple[Demand, ...], tuple[float, ...]] = {}

    def speeds(self, demands: tuple[Demand, ...]) -> tuple[float, ...]:
        """Return the speed of each flow among all running flows, relative to its peak: 0 to 1."""
        if demands not in self._known:
            rates = _fill(demands, self._capacities)
            self._known[demands] = tuple(
                1.0 if rate == demand.peak_bytes_per_s else rate / demand.peak_bytes_per_s
                for rate, demand in zip(rates, demands, strict=True)
            )
        return self._known[demands]


def _fill(demands: Sequence[Demand], capacities: Mapping[Lane, float]) -> list[float]:
    """Return the rate of each flow in bytes/s, by [Note: fair shares]."""
    rates = [0.0] * len(demands)
    rising = list(range(len(demands)))
    left = dict(capacities)
    while rising:
        # For each link, the rate at which it would be full if all flows that still rise reached that rate.
        levels = {link: _level(link, [demands[i] for i in rising], left[link]) for link in left}
        level = min(levels.values())
        at_peak = [i for i in rising if demands[i].peak_bytes_per_s <= level * _SAME]
        if at_peak:
            stay, reached = at_peak, [demands[i].peak_bytes_per_s for i in at_peak]
        else:
            full = min(levels, key=levels.__getitem__)
            stay = [i for i in rising if any(use.link is full for use in demands[i].uses)]
            reached = [level] * len(stay)
        for i, rate in zip(stay, reached, strict=True):
            rates[i] = rate
            for use in demands[i].uses:
                left[use.link] = max(0.0, left[use.link] - use.weight * rate)
        rising = [i for i in rising if i not in stay]
    return rates


def _level(link: Lane, rising: Sequence[Demand], left_bytes_per_s: float) -> float:
    weight = sum(use.weight for demand in rising for use in demand.uses if use.link is link)
    return left_bytes_per_s / weight if weight else math.inf
