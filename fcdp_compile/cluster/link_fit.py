"""A link from measured times: time = latency + bytes / bandwidth, by least squares.

Arithmetic only.  Large transfers decide on the bandwidth and small ones, with that, on the latency.  Where
the points lie on no line, as past the end of a CPU's cache, both ends are still met: a single fit would give
up one of them for what lies between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan.cost import Link

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
        raise ArgumentError("a link needs times to be fitted to, and there are none")
    for bytes_, seconds in times:
        if not (bytes_ > 0 and 0 < seconds < math.inf):
            raise ArgumentError(
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
    """The bandwidth by what large transfers take, then the latency by what is left of small ones."""
    slope = _slope(times)
    if slope <= 0:
        return Link(
            latency_s=_mean_latency_s(times, 0.0), bytes_per_s=max(times).bytes / max(times).seconds
        )
    return Link(latency_s=max(0.0, _mean_latency_s(times, slope)), bytes_per_s=1 / slope)


def _slope(times: Sequence[Timed]) -> float:
    """Seconds per byte: least squares of (time - latency - bytes * slope)^2 / time, with latency >= 0."""
    largest = max(times).bytes
    part = [t.bytes / largest for t in times]  # no huge numbers
    ones = math.fsum(1 / t.seconds for t in times)
    parts = math.fsum(x / t.seconds for x, t in zip(part, times, strict=True))
    squares = math.fsum(x * x / t.seconds for x, t in zip(part, times, strict=True))
    count, total = len(times), math.fsum(part)
    determinant = ones * squares - parts * parts
    has_line = len({t.bytes for t in times}) > 1 and determinant > 0
    if not has_line or count * squares < total * parts:  # the latency would be below zero
        return total / squares / largest
    return (total * ones - count * parts) / determinant / largest


def _mean_latency_s(times: Sequence[Timed], slope: float) -> float:
    """What times are above bytes * slope: least squares of relative deviations."""
    weights = math.fsum(t.seconds**-2 for t in times)
    return math.fsum((t.seconds - t.bytes * slope) / t.seconds**2 for t in times) / weights
