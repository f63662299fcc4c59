"""The output of `fcdp probe` for a profile: its times equal the paper's table III, and give the verdict."""

from __future__ import annotations

import dataclasses

import pytest

from fcdp_compile.cli.tables.probe import format_profile, table_three, verdict
from fcdp_compile.cluster.profile import CLUSTERS, ClusterProfile, Measured, Sample
from fcdp_compile.plan.cost import Link

A40 = CLUSTERS["a40x8-10gbe"]


def with_network(bytes_per_s: float, **changes: object) -> ClusterProfile:
    link = Link(latency_s=0.0, bytes_per_s=bytes_per_s)
    machine = dataclasses.replace(A40.machine, inter=link)
    return dataclasses.replace(A40, machine=machine, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("network", "seconds"),
    [("100g-rdma", 0.949), ("100g-ipoib", 3.963), ("10gbe", 6.745), ("1gbe", 67.66)],
)
def test_table_three_is_the_papers(network: str, seconds: float) -> None:
    """FCDP (Park et al.), table III: 16 GB over PCIe and over each network."""
    table = table_three(CLUSTERS[f"a40x8-{network}"])
    assert table.h2d_s == pytest.approx(0.613, abs=1e-3)
    assert table.d2h_s == pytest.approx(0.613, abs=1e-3)
    assert table.network_s == pytest.approx(seconds, rel=1e-3)
    assert table.host_is_faster == pytest.approx(seconds / 0.613, rel=2e-3)


def test_more_nodes_send_more_of_a_gather() -> None:
    two, eight = (dataclasses.replace(A40, nodes=n) for n in (2, 8))
    assert table_three(eight).network_s == pytest.approx(
        table_three(two).network_s * (7 / 8) / (1 / 2), rel=1e-3
    )


def test_ranks_at_one_link_get_less_of_it() -> None:
    shared = dataclasses.replace(A40, ranks_per_host_link=4)
    assert table_three(shared).h2d_s == pytest.approx(4 * table_three(A40).h2d_s, rel=1e-3)


def test_a_slow_network_is_where_fcdp_gains() -> None:
    text = verdict(A40)
    assert text.startswith(
        "Is the host faster than your network? Yes, 11 times: a rank loads 16 GB"
    )
    assert "The 8 ranks of a node load at once, each its part" in text
    assert text.endswith("fcdp gains: it loads the parameters that other strategies gather again.")


def test_a_network_faster_than_one_link_but_not_than_all() -> None:
    text = verdict(with_network(2 * A40.machine.h2d.bytes_per_s))
    assert "? No, the network is 4 times as fast: " in text
    assert "in 1/2 of the time" in text
    assert text.endswith("that other strategies gather again.")


def test_a_network_faster_than_all_links() -> None:
    text = verdict(with_network(16 * A40.machine.h2d.bytes_per_s))
    assert "? No, the network is 32 times as fast: " in text
    assert "in 4 times the time: " in text
    assert "fcdp gains nothing if it loads parameters" in text


def test_what_was_measured_and_what_not() -> None:
    times = [Sample(of=Measured.H2D, bytes=4**i, flops=0, seconds=1e-5) for i in range(6, 9)]
    text = format_profile(dataclasses.replace(A40, nodes=2, samples=tuple(times)))
    network, host = (
        next(line for line in text.splitlines() if line.startswith(start) and "MiB" not in line[:1])
        for start in ("network, of a node", "host to device")
    )
    assert network.endswith("not measured")
    assert text.count("host to device, of a rank") == 4
    rows = [line for line in text.splitlines() if line.startswith("host to device")]
    assert "extrapolated from 3 sizes up to 0.062 MiB" in rows[-1]
    assert host == rows[0]
    assert text.startswith("a40x8-10gbe: 2 x 8 ranks, cuda; FCDP (Park et al.)")
    assert rows[-1].endswith("mostly latency, so GB/s is a guess: use more --seconds")
    assert text.count("mostly latency") == 1
    big = Sample(of=Measured.H2D, bytes=16 * 10**9, flops=0, seconds=0.6)
    measured = format_profile(dataclasses.replace(A40, samples=(big,)))
    assert "measured in 1 sizes" in measured
    assert "mostly latency" not in measured


def test_numbers_stand_right_below_their_header_and_no_line_ends_in_spaces() -> None:
    lines = format_profile(A40).splitlines()
    assert all(line == line.rstrip() for line in lines)
    header = next(line for line in lines if line.startswith("link"))
    row = next(line for line in lines if line.startswith("network"))
    for name, value in (("latency us", "50.0"), ("GB/s", "1.186"), ("16 GB in s", "6.745")):
        assert header.index(name) + len(name) == row.index(value) + len(value)


def test_a_name_cannot_break_the_text() -> None:
    text = format_profile(dataclasses.replace(A40, name="a\nb", source="\x1b[31m"))
    assert text.startswith(r"a\nb: ")
    assert "\x1b" not in text
