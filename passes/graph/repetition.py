"""Find repetitions in a sequence, such as the layers of a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """`count` whole periods of `period` items each, one after the other from `start` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The first item after the last whole period."""
        return self.start + self.period * self.count


def longest_repetition(sequence: Sequence[Hashable]) -> Repetition | None:
    """The repetition that covers most of the sequence; None if nothing repeats.

        e n a m a m a m n h  ->  start 2, period 2, count 3

    Of equally long repetitions, the smallest period wins, then the first.  Any items, however many, may be
    before and after the repetition.  O(n log n).

    *Source*: Main and Lorentz, An O(n log n) algorithm for finding all repetitions in a string (1984).
    """
    numbers: dict[Hashable, int] = {}
    word = [numbers.setdefault(item, len(numbers)) for item in sequence]
    return min(
        _repetitions(word),
        key=lambda r: (-r.period * r.count, r.period, r.start),
        default=None,
    )


def stretches(sequence: Sequence[Hashable], start: int = 0) -> list[Repetition | range]:
    """Cut a sequence into its longest repetition, the repetitions before and after it, and the rest.

    start: the number of the sequence's first item.
    """
    found = longest_repetition(sequence)
    if found is None:
        return [range(start, start + len(sequence))] if sequence else []
    return [
        *stretches(sequence[: found.start], start),
        Repetition(start=start + found.start, period=found.period, count=found.count),
        *stretches(sequence[found.stop :], start + found.stop),
    ]


def _repetitions(word: list[int]) -> Iterator[Repetition]:
    """Every maximal repetition at least once, cut to whole periods.

    The word is halved again and again; the first middle that cuts a repetition is in a part that holds all
    of the repetition.
    """
    pending = [(0, len(word))]
    while pending:
        low, high = pending.pop()
        if high - low < 2:
            continue
        middle = (low + high) // 2
        yield from _across(word[low:middle], word[middle:high], low)
        pending += [(low, middle), (middle, high)]


def _across(left: list[int], right: list[int], offset: int) -> Iterator[Repetition]:
    """The repetitions that cross the border between `left`, which starts at `offset`, and `right`.

    A repetition of period p that crosses the border holds the last p items of `left` or the first p items of
    `right`.  From there it extends to both sides while the word agrees with itself shifted by p.
    """
    word, border = left + right, len(left)
    # No item has the number -1.
    backwards = _prefix_matches(left[::-1])
    ahead_of_border = _prefix_matches([*right, -1, *word])[len(right) + 1 :]
    for period in range(1, border + 1):
        begin = border - period
        back = backwards[period] if period < border else 0
        yield from _whole(offset + begin - back, back + period + ahead_of_border[begin], period)
    forwards = _prefix_matches(right)
    behind_border = _prefix_matches([*left[::-1], -1, *word[::-1]])[border + 1 :]
    for period in range(1, len(right) + 1):
        ahead = forwards[period] if period < len(right) else 0
        back = behind_border[len(right) - period]
        yield from _whole(offset + border - back, back + period + ahead, period)


def _whole(start: int, length: int, period: int) -> Iterator[Repetition]:
    if length >= 2 * period:
        yield Repetition(start=start, period=period, count=length // period)


def _prefix_matches(word: list[int]) -> list[int]:
    """For each position, how many items from there on equal the first items of the word (its Z-function)."""
    size = len(word)
    matches = [size] + [0] * (size - 1) if word else []
    begin = end = 0  # the match that reaches furthest
    for i in range(1, size):
        length = min(end - i, matches[i - begin]) if i < end else 0
        while i + length < size and word[length] == word[i + length]:
            length += 1
        matches[i] = length
        if i + length > end:
            begin, end = i, i + length
    return matches
