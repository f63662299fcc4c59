"""The bucket size with the least cost, compared with other sizes."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fcdp_compile.cluster.bucket_size import MAX_BYTES, MIN_BYTES, bucket_bytes


def cost_s(size: float, total: int, latency_s: float, bytes_per_s: float) -> float:
    """The cost that depends on the size: each message's latency, and the one message that nothing hides."""
    return latency_s * total / size + size / bytes_per_s


@given(st.integers(0, 10**12), st.floats(1e-7, 1.0), st.floats(1e5, 1e12), st.floats(-8, 8))
def test_no_size_within_the_limits_costs_less(
    total: int, latency_s: float, bytes_per_s: float, exponent: float
) -> None:
    size = bucket_bytes(total, latency_s=latency_s, bytes_per_s=bytes_per_s)
    assert MIN_BYTES <= size <= MAX_BYTES
    other = min(max(size * 2**exponent, MIN_BYTES), MAX_BYTES)
    link = (latency_s, bytes_per_s)
    # Rounding to KiB changes the size by less than a thousandth, and the cost near its minimum far less.
    assert cost_s(size, total, *link) <= cost_s(other, total, *link) * (1 + 1e-5)


def test_an_example() -> None:
    size = bucket_bytes(10**9, latency_s=1e-3, bytes_per_s=1.25e8)
    assert size == 11_180_032  # sqrt(10**9 * 1e-3 * 1.25e8) is 11.18 MB
    assert size % 1024 == 0


def test_without_latency_small_ones_are_best() -> None:
    assert bucket_bytes(10**9, latency_s=0.0, bytes_per_s=1.25e8) == MIN_BYTES


@pytest.mark.parametrize("link", [(-1e-3, 1e9), (1e-3, 0.0), (math.nan, 1e9), (1e-3, math.inf)])
def test_a_link_that_cannot_be_is_refused(link: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="cannot size buckets"):
        bucket_bytes(1, latency_s=link[0], bytes_per_s=link[1])
