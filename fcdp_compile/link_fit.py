"""A link from measured times: time = latency + bytes / bandwidth, by least squares.

Arithmetic only.  Deviations count relative to the time measured, so that small transfers decide on the
latency and large ones on the bandwidth, whatever lies between them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fcdp_compile.cost import Link

# One size that went wrong (another job's burst, a change of protocol inside the library) must not decide:
# it is left out if without it the line is off by less than a quarter of what it is off by at that size.
_OUTLIER = 4.0
_TOLERATED = 0.25
"""How far off a measurement may be without any question."""
_LEAST_LEFT = 3
"""A line through two points has no deviations to compare with."""


class Timed(NamedTuple):
    """A transfer: bytes and how long it took."""

    bytes: int
    seconds: float


def fit_link(times: Sequence[Timed]) -> Link:
    """The link whose times are nearest to those measured.

    Where times do not grow with the size, nothing but latency was seen; the bandwidth is then what the
    largest transfer reached, which is less than the link's.  Of a single size nothing is said to be latency.

    Raises: ValueError without times, and for bytes or seconds that are not above zero.
    """
    if not times:
        raise ValueError("a link needs times to be fitted to, and there are none")
    for bytes_, seconds in times:
        if not (bytes_ > 0 and 0 < seconds < math.inf):
            raise ValueError(
                f"a link is fitted to positive sizes and times, not to {bytes_} bytes in {seconds} s"
            )
    link = _line(times)
    if len(times) <= _LEAST_LEFT or worst_deviation(times, link) <= _TOLERATED:
        return link
    return _without_outlier(times, link)


def worst_deviation(times: Sequence[Timed], link: Link) -> float:
    """How far off a link's times are at most, relative to those measured."""
    return max(_deviation(time, link) for time in times)


def _without_outlier(times: Sequence[Timed], link: Link) -> Link:
    """The fit without the one size that contradicts all others, if there is one."""
    fits = [(i, _line([*times[:i], *times[i + 1 :]])) for i in range(len(times))]
    without, best = min(
        fits, key=lambda f: worst_deviation([*times[: f[0]], *times[f[0] + 1 :]], f[1])
    )
    rest = worst_deviation([*times[:without], *times[without + 1 :]], best)
    return best if _deviation(times[without], best) > max(_TOLERATED, _OUTLIER * rest) else link


def _deviation(time: Timed, link: Link) -> float:
    # Of the smaller one, so that too slow by a factor counts as much as too fast.
    predicted = link.time_s(time.bytes)
    return abs(predicted - time.seconds) / min(predicted, time.seconds)


def _line(times: Sequence[Timed]) -> Link:
    """Least squares of 1 = latency / time + (bytes / bandwidth) / time, with neither below zero."""
    largest = max(times)
    u = [1.0 / t.seconds for t in times]
    v = [
        t.bytes / largest.bytes / t.seconds for t in times
    ]  # s per largest transfer: no huge numbers
    uu, uv, vv = (
        math.fsum(a * b for a, b in zip(x, y, strict=True)) for x, y in ((u, u), (u, v), (v, v))
    )
    su, sv = math.fsum(u), math.fsum(v)
    determinant = uu * vv - uv * uv
    if len({t.bytes for t in times}) < 2 or determinant <= 0:
        return _proportional(largest.bytes, sv / vv)
    latency_s = (su * vv - sv * uv) / determinant
    moving_s = (sv * uu - su * uv) / determinant
    if latency_s < 0:
        return _proportional(largest.bytes, sv / vv)
    if moving_s <= 0:
        return Link(latency_s=su / uu, bytes_per_s=largest.bytes / largest.seconds)
    return Link(latency_s=latency_s, bytes_per_s=largest.bytes / moving_s)


def _proportional(bytes_: int, seconds: float) -> Link:
    return Link(latency_s=0.0, bytes_per_s=bytes_ / seconds)
