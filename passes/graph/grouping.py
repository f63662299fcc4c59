"""Choose where buckets begin and end in a sequence of parameters; arithmetic only."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fcdp_compile.passes.graph.repetition import Repetition, stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Items that share a bucket, by their positions in the sequence, and the reason."""

    items: tuple[int, ...]
    why: str


def group(kinds: Sequence[Hashable], sizes: Sequence[int], target: int) -> list[Group]:
    """Split a sequence into groups of about `target` bytes, at the same places in every repetition.

        e | n a m  n a m  n a m  n a m | h     target = 2 periods  ->  [e] [namnam] [namnam h]
                                               target < 1 period   ->  [e] [na] [m] [na] [m] ...

    An item of at least `target` bytes is a group alone, and the rest is split as if it were not there.  If
    the period of a repetition fits into a group, groups hold as many whole periods as fit; a longer period is
    cut into parts of about equal size.  Items outside of repetitions fill groups one after the other, and
    join the first or last group of a repetition if that group has room.

    kinds: equal where items are interchangeable.  sizes: bytes.
    Returns groups in the order of their first items.
    """
    alone = [i for i, size in enumerate(sizes) if size >= target]
    groups = [Group(items=(i,), why="fills a bucket alone") for i in alone]
    rest = [i for i, size in enumerate(sizes) if size < target]
    filling = _Filling([sizes[i] for i in rest], target)
    for piece in stretches([kinds[i] for i in rest]):
        if isinstance(piece, range):
            filling.add(piece)
        else:
            filling.add_repetition(piece)
    filling.close()
    groups += [Group(items=tuple(rest[i] for i in g.items), why=g.why) for g in filling.groups]
    return sorted(groups, key=lambda g: g.items[0])


class _Filling:
    """Groups being filled with items smaller than `target`; at most one is open."""

    def __init__(self, sizes: Sequence[int], target: int) -> None:
        self._sizes = sizes
        self._target = target
        self._open: list[int] = []
        self._open_bytes = 0
        self._why = ""
        self.groups: list[Group] = []

    def add(self, items: range) -> None:
        """Fill groups one after the other; the last one stays open."""
        for item in items:
            self._append([item], self._target, "shared by order of first use")

    def add_repetition(self, repeated: Repetition) -> None:
        """Fill groups with the periods of a repetition; the last one stays open."""
        period_bytes = sum(self._sizes[repeated.start : repeated.start + repeated.period])
        fitting = self._target // max(1, period_bytes)
        if not fitting:
            self._split_periods(repeated, period_bytes)
            return
        many = _even(min(fitting, repeated.count), repeated.count)
        for first in range(0, repeated.count, many):
            here = min(many, repeated.count - first)
            start = repeated.start + first * repeated.period
            if first or self._open_bytes + here * period_bytes > self._target:
                self.close()
            why = f"{here} x {repeated.period} parameters that repeat"
            self._append(range(start, start + here * repeated.period), self._target, why)

    def _split_periods(self, repeated: Repetition, period_bytes: int) -> None:
        parts = math.ceil(period_bytes / self._target)
        part_bytes = math.ceil(period_bytes / parts)
        why = f"a part of {repeated.period} parameters that repeat"
        for start in range(repeated.start, repeated.stop, repeated.period):
            self.close()
            for item in range(start, start + repeated.period):
                self._append([item], part_bytes, why)

    def _append(self, items: Sequence[int], full_bytes: int, why: str) -> None:
        """Put items into the open group and close it if it has `full_bytes`."""
        self._why = self._why or why
        self._open += items
        self._open_bytes += sum(self._sizes[i] for i in items)
        if self._open_bytes >= full_bytes:
            self.close()

    def close(self) -> None:
        """End the open group."""
        if self._open:
            self.groups.append(Group(items=tuple(self._open), why=self._why))
        self._open, self._open_bytes, self._why = [], 0, ""


def _even(fitting: int, count: int) -> int:
    """Periods for each group: a divisor of `count` above half of `fitting`, or else `fitting`."""
    divisor = max(d for d in range(1, fitting + 1) if count % d == 0)
    return divisor if 2 * divisor > fitting else fitting
