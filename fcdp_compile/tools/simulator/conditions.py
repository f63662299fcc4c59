"""Deviations from the profile: slow nodes, slow cards, jitter; and which nodes are alike.

[Note: folding]
The ranks of a node do the same at the same time, and so do nodes in the same state.  So one rank represents
all ranks of all nodes of a class, and its flows count on a link once for each rank that shares the link.
Without jitter there are as many classes as kinds of nodes: 512 nodes of 8 ranks cost as much to simulate as
one node of 1.  With jitter every node is a class of its own, and time and memory grow with nodes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, replace

from fcdp_compile.errors import ArgumentError

_MOST_JITTER = 1e100
"""The square of this is finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Differences between nodes; the default has none.

    stragglers: pairs of a number of nodes and a factor on the time of everything that they compute, including
    copies that put parts in order and the optimizer.  slow_links: pairs of a number of nodes and a factor on
    the bandwidth of their cards.  No node is in two pairs.  jitter: standard deviation, relative to the mean,
    of the time of each compute step's operators on each node; times are drawn from a log-normal distribution
    whose mean is their time without jitter, and the ranks of a node share them.  seed: of the random numbers.

    Raises: ValueError for fewer than one node, a factor that is not finite and above zero, a jitter that is
    not finite and at least zero, a seed below zero; TypeError for a number of nodes or a seed that is
    not an int.
    """

    stragglers: tuple[tuple[int, float], ...] = ()
    slow_links: tuple[tuple[int, float], ...] = ()
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("stragglers", "slow_links"):
            for count, factor in getattr(self, name):
                _check_int(f"number of nodes in {name}", count, least=1)
                if not 0 < factor < math.inf:
                    raise ArgumentError(
                        f"a factor in {name} is {factor}, but must be finite and above zero"
                    )
        if not 0 <= self.jitter < _MOST_JITTER:
            raise ArgumentError(f"jitter is {self.jitter}, but must be finite and at least zero")
        _check_int("seed", self.seed, least=0)


def _check_int(what: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"the {what} must be an int, not {type(value).__name__}")
    if value < least:
        raise ArgumentError(f"the {what} is {value}, but must be at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeClass:
    """Nodes in the same state: their number, and their factors of `Conditions`."""

    nodes: int
    slowdown: float = 1.0
    inter_factor: float = 1.0


def fold(conditions: Conditions, nodes: int) -> tuple[NodeClass, ...]:
    """Return the classes ([Note: folding]) of N = `nodes` nodes: stragglers, slow links, then all others.

    Raises: ValueError if the conditions name more nodes than there are.
    """
    counts = Counter[tuple[float, float]]()
    for count, slowdown in conditions.stragglers:
        counts[slowdown, 1.0] += count
    for count, factor in conditions.slow_links:
        counts[1.0, factor] += count
    named = sum(counts.values())
    if named > nodes:
        raise ArgumentError(
            f"the conditions are of {named} nodes, but there are {nodes}; name fewer, or simulate more"
        )
    if nodes > named:
        counts[1.0, 1.0] += nodes - named
    classes = [
        NodeClass(nodes=count, slowdown=slowdown, inter_factor=factor)
        for (slowdown, factor), count in counts.items()
    ]
    if not conditions.jitter:
        return tuple(classes)
    return tuple(replace(c, nodes=1) for c in classes for _ in range(c.nodes))


class Jitter:
    """Random factors on the times of compute steps.

    Source: a log-normal distribution exp(m + s*z) has the mean exp(m + s*s/2) and the relative variance
    exp(s*s) - 1.
    """

    def __init__(self, conditions: Conditions) -> None:
        variance = math.log1p(conditions.jitter**2)
        self._mean, self._deviation = -variance / 2, math.sqrt(variance)
        self._random = random.Random(conditions.seed)

    def draw(self) -> float:
        if not self._deviation:
            return 1.0
        return math.exp(self._random.gauss(self._mean, self._deviation))
