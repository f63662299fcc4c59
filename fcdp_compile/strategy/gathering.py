"""Algorithms that gather home shards between N nodes of g ranks, into full parameters.

    hierarchical   inter-node all-gather [N*S], then intra-node all-gather [G*S]
    ho_ring        inter-node all-gather [N*S] | intra-node all-gather of this node's own shards [g*S],
                   then intra-node all-gather of the other nodes' shards [(N-1)*g*S]

Both move the same bytes over the same links; HO-Ring moves some of them earlier.

Source: PaRO (Wu et al., 2023), section 3.4, for HO-Ring.
"""

from __future__ import annotations

from enum import Enum


class Algorithm(Enum):
    """The algorithm of gathers between nodes."""

    HIERARCHICAL = "hierarchical"
    HO_RING = "ho_ring"
