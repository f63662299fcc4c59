"""Every rank comes to know every rank's words, in as many hops as doubling needs."""

from __future__ import annotations

import math

import pytest

from fcdp_compile.dissemination import hops, rounds


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node"),
    [(n, g) for n in (1, 2, 3, 4, 5, 7, 16) for g in (1, 2, 3, 5, 8)] + [(64, 8)],
)
def test_every_rank_knows_all_in_the_end(nodes: int, ranks_per_node: int) -> None:
    ranks = [(n, p) for n in range(nodes) for p in range(ranks_per_node)]
    of = {r: list(rounds(nodes, ranks_per_node, *r)) for r in ranks}
    knows = {r: {r} for r in ranks}
    expected = math.ceil(math.log2(nodes)) + math.ceil(math.log2(ranks_per_node))
    for number in range(expected):
        for rank in ranks:
            sent = of[rank][number]
            assert of[sent.to][number].source == rank, "both sides expect the message"
        knows = {r: knows[r] | knows[of[r][number].source] for r in ranks}
    assert all(len(known) == len(ranks) for known in knows.values())
    assert {len(of[r]) for r in ranks} == {expected}
    assert hops(nodes) + hops(ranks_per_node) == expected


def test_ranks_of_a_node_come_first() -> None:
    crosses = [hop.to[0] != 5 for hop in rounds(16, 8, 5, 3)]
    assert crosses == [False] * 3 + [True] * 4


def test_large_clusters_take_few_hops() -> None:
    assert [hops(n) + hops(8) for n in (16, 512)] == [7, 12]  # a ring takes 127 and 4,095
