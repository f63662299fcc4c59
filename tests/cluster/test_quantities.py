"""Sizes and bandwidths as people write them."""

from __future__ import annotations

import pytest

from fcdp_compile.cluster.quantities import parse_bytes, parse_bytes_per_s


@pytest.mark.parametrize(
    ("text", "size"), [("64GiB", 64 * 2**30), ("1.5 KB", 1500), ("7B", 7), ("0.5MiB", 2**19)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "64", "64G", "64gib", "-1GiB", "1e3MB", " 1MB", "1MB\n"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number with one of the units B, KB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("10G", 1.25e9),
        ("10g", 1.25e9),
        ("10Gbit", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("10Gb/s", 1.25e9),
        ("10 Gbps", 1.25e9),
        ("1gbit", 125e6),
        ("2.5Gbit", 312.5e6),
        ("1.25GB/s", 1.25e9),
        ("1.25 GB", 1.25e9),
        ("125MB/s", 125e6),
        ("8bit/s", 1.0),
        ("1T", 125e9),
    ],
)
def test_bandwidths(text: str, bytes_per_s: float) -> None:
    assert parse_bytes_per_s(text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["", "10", "G", "10 ", "10GiB/s", "10Gbit/h", "-1G", "fast", "1e9G", "10G\n"]
)
def test_what_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 10G .*, 10Gbit/s or 1\.25GB/s, not "):
        parse_bytes_per_s(text)


@pytest.mark.parametrize("text", ["0G", "0.0GB/s", "9999999T"])
def test_a_bandwidth_has_limits(text: str) -> None:
    with pytest.raises(ValueError, match="above 0 and below"):
        parse_bytes_per_s(text)
