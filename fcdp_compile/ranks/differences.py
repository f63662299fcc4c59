"""What ranks that should be alike differ in."""

from __future__ import annotations

from collections.abc import Sequence


def first_other(values: Sequence[object]) -> int | None:
    """The first rank whose value is not rank 0's; None if all ranks have the same.  values: by rank."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)
