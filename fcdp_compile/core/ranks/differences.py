"""Ranks in messages: find a rank that differs, and name several ranks."""

from __future__ import annotations

from collections.abc import Sequence


def first_other(values: Sequence[object]) -> int | None:
    """The first rank whose value differs from rank 0's; None if all are equal.  values: one of each rank."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks in a message: "rank 3", "ranks 0, 2, …"."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
