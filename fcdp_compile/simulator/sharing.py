"""Links that several flows use at the same time, as fluids: how fast each of them moves.

[Note: fair shares]
Flows on a link get the same bytes/s, and what one cannot use goes to the others: all flows rise together; one
that is as fast as it can be stays there, and when a link is full those on it stay where they are (max-min
fairness, by progressive filling).  So a flow over several links gets the least of its shares.  A flow that
stands for several ranks in step ([Note: folding]) weighs as much on a link as it has of them there, and gets
the share of one.

Source: Bertsekas and Gallager, Data Networks (1992), section 6.5.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class SharedLink(Enum):
    """Links of one rank, or of the ranks at one switch, that steps of different lanes may use."""

    INTRA = "intra"
    H2D = "h2d"
    D2H = "d2h"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """A link that a flow uses; weight: bytes over the link for each byte of the flow."""

    link: SharedLink
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a flow would take of its links; peak_bytes_per_s: how fast it is where nothing is in its way."""

    peak_bytes_per_s: float
    uses: tuple[LinkUse, ...]


_SAME = 1 + 1e-9
"""Rates that differ by less are the same, so that rounding slows no flow down."""


class Sharing:
    """Shares of the links of one rank.

    capacities: in bytes/s.
    """

    def __init__(self, capacities: Mapping[SharedLink, float]) -> None:
        self._capacities = capacities
        self._known: dict[tuple[Demand, ...], tuple[float, ...]] = {}

    def speeds(self, demands: tuple[Demand, ...]) -> tuple[float, ...]:
        """How fast each of the flows moves that are under way, relative to its peak: 0 to 1."""
        if demands not in self._known:
            rates = _fill(demands, self._capacities)
            self._known[demands] = tuple(
                1.0 if rate == demand.peak_bytes_per_s else rate / demand.peak_bytes_per_s
                for rate, demand in zip(rates, demands, strict=True)
            )
        return self._known[demands]


def _fill(demands: Sequence[Demand], capacities: Mapping[SharedLink, float]) -> list[float]:
    """The rate of each flow in bytes/s, of [Note: fair shares]."""
    rates = [0.0] * len(demands)
    rising = list(range(len(demands)))
    left = dict(capacities)
    while rising:
        # Where each link would be full, if all that still rise went on to there.
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


def _level(link: SharedLink, rising: Sequence[Demand], left_bytes_per_s: float) -> float:
    weight = sum(use.weight for demand in rising for use in demand.uses if use.link is link)
    return left_bytes_per_s / weight if weight else math.inf
