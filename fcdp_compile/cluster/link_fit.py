"""Fit a link to measured times: time = latency + bytes / bandwidth, by least squares.

Arithmetic only.  Large transfers determine the bandwidth and small ones, given the bandwidth, the latency.
So both ends fit even if the points lie on no line, as where sizes exceed a CPU's cache; a single fit would
give up one end for the points between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan.cost import Link

# One bad measurement (another job's burst, a change of protocol inside the library) must not decide: it is
# left out if the line through the others deviates from it over four times as much as from any of them.
_OUTLIER = 4.0
_TOLERATED = 0.25
"""The relative deviation up to which no measurement is left out."""
_LEAST_LEFT = 3
"""A line through two points has no deviations to compare with."""


class Timed(NamedTuple):
    """A transfer: bytes and how long it took."""

    bytes: int
    seconds: float


def fit_link(times: Sequence[Timed]) -> Link:
    """The link whose times are nearest to the measured times.

    If times do not grow with the size, only latency was measured; the bandwidth is then the rate of the
    largest transfer, which is below the link's.  If there is only one size, the latency is zero.

    Raises: ValueError without times, and for bytes or seconds that are not above zero.
    """
    if not times:
        raise ArgumentError("a link needs times to be fitted to, and there are none")
    for bytes_, seconds in times:
        if not (bytes_ > 0 and 0 < seconds < math.inf):
            raise ArgumentError(
                f"a link is fitted to positive sizes and times, not to {bytes_} bytes in {seconds} s"
            )
    times = sorted(times)  # where two sizes contradict equally, the order must not decide
    link = _line(times)
    if len(times) <= _LEAST_LEFT or worst_deviation(times, link) <= _TOLERATED:
        return link
    return _without_outlier(times, link)


def worst_deviation(times: Sequence[Timed], link: Link) -> float:
    """The largest relative deviation of a link's times from the measured times."""
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
    # Relative to the smaller time, so that too slow by a factor counts as much as too fast.
    predicted = link.time_s(time.bytes)
    return abs(predicted - time.seconds) / min(predicted, time.seconds)


def _line(times: Sequence[Timed]) -> Link:
    """Fit the bandwidth, mainly to large transfers, then the latency, mainly to small ones."""
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
    """The mean of time - bytes * slope: least squares of relative deviations."""
    weights = math.fsum(t.seconds**-2 for t in times)
    return math.fsum((t.seconds - t.bytes * slope) / t.seconds**2 for t in times) / weights
