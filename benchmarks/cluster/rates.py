"""Rates of cards, as text and as arguments of the kernel's token bucket filter."""

from __future__ import annotations

import re

_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LEAST_BITS_PER_S = 10**4
_LEAST_BURST_BYTES = 128 * 2**10
"""More than the largest packet of a card (64 KiB), so that no packet is split."""


def read_rate(text: str) -> int | None:
    """Return the bits per second of `1gbit`, `12.5mbit`, `500kbit`; None for `none`, which is no limit.

    Raises: ValueError for other texts, and below 10kbit.
    """
    if text == "none":
        return None
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.lower())
    if parts is None:
        raise ValueError(
            f"{text!r} is no rate; write 100mbit, 1gbit, 2.5gbit, or none for no limit"
        )
    bits_per_s = round(float(parts[1]) * _UNITS[parts[2]])
    if bits_per_s < _LEAST_BITS_PER_S:
        raise ValueError(f"a card cannot be limited to {text}; the least is 10kbit")
    return bits_per_s


def write_rate(bits_per_s: int | None) -> str:
    """Return a short text that `read_rate` reads back."""
    if bits_per_s is None:
        return "none"
    unit = max((u for u in _UNITS if _UNITS[u] <= bits_per_s), key=_UNITS.__getitem__)
    return f"{bits_per_s / _UNITS[unit]:.10g}{unit}"


def token_bucket(bits_per_s: int) -> list[str]:
    """Return the filter as arguments of `tc qdisc`: rate, burst, and 200 ms of queue until packets drop.

    The burst is a millisecond's bytes: the kernel cannot wake up much more often to refill a bucket.
    """
    burst = max(_LEAST_BURST_BYTES, bits_per_s // 8 // 1000)
    return ["tbf", "rate", f"{bits_per_s}bit", "burst", str(burst), "latency", "200ms"]
