"""Repetitions in a sequence, compared with trying every start and period."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fcdp_compile.passes.graph.repetition import Repetition, longest_repetition


def slowly(word: list[int]) -> Repetition | None:
    """Every start, period and count."""
    found = []
    for start in range(len(word)):
        for period in range(1, (len(word) - start) // 2 + 1):
            count = 1
            at = word[start : start + period]
            while word[start + count * period : start + (count + 1) * period] == at:
                count += 1
            if count > 1:
                found.append(Repetition(start=start, period=period, count=count))
    return min(found, key=lambda r: (-r.period * r.count, r.period, r.start), default=None)


@settings(max_examples=500)
@given(st.lists(st.integers(0, 2), max_size=24))
def test_it_is_the_one_that_trying_everything_finds(word: list[int]) -> None:
    assert longest_repetition(word) == slowly(word)


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 3), max_size=9),
    st.lists(st.integers(4, 7), min_size=1, max_size=6),
    st.integers(5, 30),
    st.lists(st.integers(0, 3), max_size=9),
)
def test_layers_are_found_between_any_prologue_and_epilogue(
    before: list[int], layer: list[int], count: int, after: list[int]
) -> None:
    found = longest_repetition([*before, *layer * count, *after])
    assert found is not None
    inner = longest_repetition(layer * count)
    assert inner is not None
    if len(layer) * count > len(before) + len(after):
        assert (found.start, found.stop) == (len(before), len(before) + len(layer) * count)
        assert found.period == inner.period


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("", None),
        ("a", None),
        ("abcd", None),
        ("aa", (0, 1, 2)),
        ("enamamamnh", (2, 2, 3)),
        ("abababa", (0, 2, 3)),  # six of the seven items: only whole periods count
        ("aabaab", (0, 3, 2)),
        ("xaaay", (1, 1, 3)),
    ],
)
def test_examples(word: str, expected: tuple[int, int, int] | None) -> None:
    found = longest_repetition(word)
    assert (found and (found.start, found.period, found.count)) == expected


def test_items_may_be_anything_hashable() -> None:
    found = longest_repetition([((4, 4), "float32"), None] * 3)
    assert found == Repetition(start=0, period=2, count=3)


def test_time_grows_little_faster_than_the_length() -> None:
    """Comparisons of items, not seconds: a quadratic search makes 25 million of them."""

    class Counted:
        comparisons = 0

        def __init__(self, value: int) -> None:
            self.value = value

        def __hash__(self) -> int:
            return hash(self.value)

        def __eq__(self, other: object) -> bool:
            Counted.comparisons += 1
            return isinstance(other, Counted) and self.value == other.value

    word = [Counted(i % 17) for i in range(5000)]
    found = longest_repetition(word)
    assert found is not None
    assert (found.period, found.count) == (17, 294)
    assert Counted.comparisons <= 5 * len(word)
