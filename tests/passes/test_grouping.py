"""Bucket boundaries: at the same places in every layer."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fcdp_compile.passes.graph.grouping import group

SIZES = {"e": 40, "n": 1, "a": 6, "m": 3, "h": 2}  # a layer of n, a, m takes 10


def split(word: str, target: int) -> list[str]:
    groups = group(word, [SIZES[c] for c in word], target)
    return ["".join(word[i] for i in g.items) for g in groups]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (1000, ["enamnamnamnamh"]),
        (100, ["enamnamnamnamh"]),
        (40, ["e", "namnamnamnam", "h"]),  # four layers of 10 fill it exactly
        (39, ["e", "namnam", "namnamh"]),  # three layers fit, but two divide four evenly
        (20, ["e", "namnam", "namnam", "h"]),
        (12, ["e", "nam", "nam", "nam", "namh"]),
        (9, ["e", "na", "m", "na", "m", "na", "m", "na", "mh"]),
        (6, ["e", "nm", "a", "nm", "a", "nm", "a", "nmh", "a"]),
    ],
)
def test_layers_are_cut_at_the_same_places(target: int, expected: list[str]) -> None:
    assert split("e" + "nam" * 4 + "h", target) == expected


def test_a_prime_number_of_layers_leaves_a_rest() -> None:
    assert split("nam" * 7, 30) == ["namnamnam", "namnamnam", "nam"]


def test_what_is_around_joins_where_there_is_room() -> None:
    assert split("h" + "nam" * 4 + "h", 12) == ["hnam", "nam", "nam", "namh"]
    assert split("hh" + "nam" * 4 + "h", 12) == ["hh", "nam", "nam", "nam", "namh"]


def test_every_group_says_why() -> None:
    word = "e" + "nam" * 4 + "h"
    groups = group(word, [SIZES[c] for c in word], 20)
    assert [g.why for g in groups] == [
        "fills a bucket alone",
        *["2 x 3 parameters that repeat"] * 2,
        "shared by order of first use",
    ]


def test_nothing_makes_no_group() -> None:
    assert group([], [], 10) == []


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=40),
    st.integers(1, 30),
)
def test_every_item_is_in_one_group_of_no_more_than_it_may_hold(
    drawn: list[tuple[int, int]], target: int
) -> None:
    sizes = [size for _, size in drawn]
    groups = group(drawn, sizes, target)
    assert sorted(i for g in groups for i in g.items) == list(range(len(drawn)))
    assert [g.items[0] for g in groups] == sorted(g.items[0] for g in groups)
    for g in groups:
        assert list(g.items) == sorted(g.items)
        # Whole layers may fill a group exactly and end in an empty item.
        total = sum(sizes[i] for i in g.items)
        assert len(g.items) == 1 or total <= target or total - sizes[g.items[-1]] < target
        assert len(g.items) == 1 or max(sizes[i] for i in g.items) < target


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5, unique=True),
    st.integers(6, 20),
    st.integers(1, 100),
    st.lists(st.integers(10, 12), max_size=4, unique=True),
    st.lists(st.integers(13, 15), max_size=4, unique=True),
)
def test_layers_are_cut_alike_whatever_stands_around(
    layer: list[int], count: int, target: int, before: list[int], after: list[int]
) -> None:
    kinds = [*before, *layer * count, *after]
    cuts: dict[int, list[tuple[int, ...]]] = {}
    for g in group(kinds, kinds, target):
        number, phase = divmod(g.items[0] - len(before), len(layer))
        cuts.setdefault(number, []).append((phase, *(i - g.items[0] for i in g.items)))
    if sum(s for s in layer if s < target) > target:
        assert [len(cuts[n]) for n in range(count)].count(len(cuts[1])) >= count - 2
        assert all(cuts[n] == cuts[1] for n in range(1, count - 1))
    else:
        shared = [g for n, cut in cuts.items() for g in cut if 0 < n < count and len(g) > 2]
        assert (
            len(set(shared)) <= 3
        )  # groups of as many layers as fit, of the rest, and of the last layer with the head
