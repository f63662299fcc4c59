"""Links fitted to times: exact ones come back, one bad size does not matter, nonsense is refused."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from fcdp_compile.cluster.link_fit import Timed, fit_link, worst_deviation
from fcdp_compile.plan.cost import Link

SIZES = [4096 * 4**i for i in range(9)]  # 4 KiB to 256 MiB

links = st.builds(
    Link,
    latency_s=st.just(0.0) | st.floats(1e-6, 1e-2),
    bytes_per_s=st.floats(1e6, 1e12),
)


def times_of(link: Link, sizes: list[int] = SIZES) -> list[Timed]:
    return [Timed(size, link.time_s(size)) for size in sizes]


@given(links, st.lists(st.sampled_from(SIZES), min_size=2, unique=True))
def test_exact_times_give_the_link_back(link: Link, sizes: list[int]) -> None:
    found = fit_link(times_of(link, sizes))
    assert worst_deviation(times_of(link, sizes), found) < 1e-6


@given(links)
def test_what_decides_times_is_found(link: Link) -> None:
    """The latency if small transfers show it, the bandwidth if large ones do."""
    found = fit_link(times_of(link))
    if link.latency_s > 0.01 * SIZES[0] / link.bytes_per_s:
        assert found.latency_s == pytest.approx(link.latency_s, rel=1e-4)
    if link.latency_s < 100 * SIZES[-1] / link.bytes_per_s:
        assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-4)


@given(links, st.integers(4, 9), st.data())
def test_one_size_that_went_wrong_is_left_out(link: Link, count: int, data: st.DataObject) -> None:
    times = times_of(link, SIZES[:count])
    i = data.draw(st.integers(0, count - 1))
    factor = data.draw(st.floats(4, 1000) | st.floats(0.001, 0.25))
    times[i] = Timed(times[i].bytes, factor * times[i].seconds)
    right = times_of(link, SIZES[:count])
    assert worst_deviation(right[:i] + right[i + 1 :], fit_link(times)) < 1e-6


@given(links, st.lists(st.floats(0.95, 1.05), min_size=9, max_size=9))
def test_noise_moves_times_little(link: Link, noise: list[float]) -> None:
    times = [
        Timed(t.bytes, t.seconds * factor) for t, factor in zip(times_of(link), noise, strict=True)
    ]
    if link.latency_s < 10 * SIZES[-1] / link.bytes_per_s:  # else no size shows the bandwidth
        assert worst_deviation(times_of(link), fit_link(times)) < 0.15


@given(
    st.lists(
        st.builds(Timed, st.integers(1, 2**40), st.floats(1e-9, 1e6)), min_size=1, max_size=12
    ),
    st.floats(1e-3, 1e3),
)
@example([Timed(1, 1.0), Timed(1, 1.0), Timed(2, 2.0), Timed(1_950_520_299, 81654.0)], 1.0)
def test_any_times_give_a_link_and_the_unit_does_not_matter(
    times: list[Timed], factor: float
) -> None:
    found = fit_link(times)
    assert found.latency_s >= 0
    assert found.bytes_per_s > 0
    assert fit_link(times[::-1]).time_s(1000) == pytest.approx(found.time_s(1000), rel=1e-3)


@given(links, st.integers(1, 4), st.floats(0.5, 2))
def test_the_unit_of_time_does_not_matter(link: Link, power: int, at: float) -> None:
    times = [Timed(t.bytes, t.seconds * (1 + at * (i % 2))) for i, t in enumerate(times_of(link))]
    found = fit_link(times)
    scaled = fit_link([Timed(t.bytes, t.seconds * 2**power) for t in times])
    assert scaled.latency_s == pytest.approx(found.latency_s * 2**power)
    assert scaled.bytes_per_s == pytest.approx(found.bytes_per_s / 2**power)


def test_times_that_do_not_grow_are_latency() -> None:
    found = fit_link([Timed(4096, 1e-3), Timed(16384, 1e-3), Timed(65536, 0.9e-3)])
    assert found.latency_s == pytest.approx(1e-3, rel=0.1)
    assert found.bytes_per_s == pytest.approx(65536 / 0.9e-3)


def test_times_that_would_start_below_zero_have_no_latency() -> None:
    found = fit_link([Timed(1000, 1e-6), Timed(2000, 3e-6)])
    assert found.latency_s == 0
    assert 1e-6 < found.time_s(2000) < 3e-6


def test_a_single_size_is_all_bandwidth() -> None:
    assert fit_link([Timed(10**6, 0.5)]) == Link(latency_s=0.0, bytes_per_s=2e6)
    twice = fit_link([Timed(10**6, 0.5), Timed(10**6, 0.5)])
    assert twice.latency_s == 0
    assert twice.bytes_per_s == pytest.approx(2e6)


@pytest.mark.parametrize(
    "times",
    [
        [],
        [Timed(0, 1.0)],
        [Timed(-1, 1.0)],
        [Timed(1, 0.0)],
        [Timed(1, -1.0)],
        [Timed(1, float("nan"))],
        [Timed(1, float("inf"))],
    ],
)
def test_nonsense_is_refused(times: list[Timed]) -> None:
    with pytest.raises(ValueError, match="fitted to"):
        fit_link(times)
