"""Conditions by themselves: classes of nodes, the draws of jitter, and refusals."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from fcdp_compile.tools.simulator.conditions import Conditions, Jitter, fold


@pytest.mark.parametrize("deviation", [0.05, 0.5])
def test_jitter_has_the_mean_and_deviation_that_it_says(deviation: float) -> None:
    jitter = Jitter(Conditions(jitter=deviation, seed=7))
    drawn = [jitter.draw() for _ in range(100_000)]
    assert statistics.mean(drawn) == pytest.approx(1, abs=4 * deviation / math.sqrt(len(drawn)))
    assert statistics.stdev(drawn) == pytest.approx(deviation, rel=0.03)
    assert min(drawn) > 0


def test_nodes_of_one_state_are_one_class() -> None:
    conditions = Conditions(stragglers=((2, 1.5), (3, 2.0), (1, 1.5)), slow_links=((4, 0.5),))
    classes = fold(conditions, 512)
    assert [(c.nodes, c.slowdown, c.inter_factor) for c in classes] == [
        (3, 1.5, 1.0),
        (3, 2.0, 1.0),
        (4, 1.0, 0.5),
        (502, 1.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"stragglers": ((0, 2.0),)}, ValueError, "number of nodes in stragglers is 0"),
        ({"stragglers": ((1, 0.0),)}, ValueError, "factor in stragglers is 0.0"),
        ({"slow_links": ((1, math.inf),)}, ValueError, "factor in slow_links is inf"),
        ({"slow_links": ((1, math.nan),)}, ValueError, "factor in slow_links is nan"),
        ({"slow_links": ((1.5, 0.5),)}, TypeError, "must be an int, not float"),
        ({"stragglers": ((True, 0.5),)}, TypeError, "must be an int, not bool"),
        ({"jitter": -0.1}, ValueError, "jitter is -0.1"),
        ({"jitter": math.nan}, ValueError, "jitter is nan"),
        ({"seed": -1}, ValueError, "seed is -1"),
    ],
)
def test_nonsense_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Conditions(**arguments)


def test_conditions_of_more_nodes_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="conditions are of 9 nodes, but there are 8"):
        fold(Conditions(stragglers=((5, 2.0),), slow_links=((4, 0.5),)), 8)


def test_nodes_as_all_others_are_no_class_of_their_own() -> None:
    conditions = Conditions(stragglers=((1, 1.0), (2, 2.0), (1, 2.0)), slow_links=((1, 1.0),))
    found = [(c.nodes, c.slowdown, c.inter_factor) for c in fold(conditions, 512)]
    assert found == [(509, 1.0, 1.0), (3, 2.0, 1.0)]


def test_with_jitter_every_node_is_a_class() -> None:
    classes = fold(Conditions(stragglers=((2, 2.0),), jitter=0.1), 5)
    assert [(c.nodes, c.slowdown) for c in classes] == [(1, 2.0)] * 2 + [(1, 1.0)] * 3
