"""Sizes and bandwidths as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

from fcdp_compile.errors import ArgumentError

UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}
"""Bytes of each unit of a size."""

_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", re.ASCII)

# Network speeds are in bits: 10G is 10 Gbit/s.  Only a capital B means bytes.
_BANDWIDTH = re.compile(
    r"(\d+(?:\.\d+)?) ?(?!$)([KMGTkmgt]?)(?:(B(?:/s|ps)?)|(?:bit|b)(?:/s|ps)?)?", re.ASCII
)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "64GiB" or "1.5 GB".

    Raises: ValueError for anything else.
    """
    if (parts := _SIZE.fullmatch(text)) is None:
        raise ArgumentError(
            f"must be a number with one of the units {', '.join(UNITS)}, such as '64GiB', not {text!r}"
        )
    return int(Fraction(parts[1]) * UNITS[parts[2]])


def parse_bytes_per_s(text: str) -> float:
    """Bytes per second of a bandwidth such as "10G", "10Gbit/s" (both 10^10 bits) or "1.25GB/s".

    Raises: ValueError for anything else, and if it is 0 or not below 1e15 bytes per second.
    """
    if (parts := _BANDWIDTH.fullmatch(text)) is None:
        raise ArgumentError(
            f"must be a bandwidth such as 10G (bits per second), 10Gbit/s or 1.25GB/s, not {text!r}"
        )
    factor = 1000 ** " KMGT".index(parts[2].upper() or " ")
    found = float(Fraction(parts[1]) * factor / (1 if parts[3] else 8))
    if not 0 < found < 1e15:
        raise ArgumentError(f"must be above 0 and below 1e15 bytes per second, not {text!r}")
    return found
