"""How home shards become full parameters where they cross between nodes, N nodes of g ranks.

    hierarchical   inter-node all-gather [N*S], then intra-node all-gather [G*S]
    ho_ring        inter-node all-gather [N*S] | intra-node all-gather of this node's own [g*S],
                   then intra-node all-gather of what arrived [(N-1)*g*S]
    ring           one all-gather over all ranks in their order [G*S], each sending to the next

The first two move the same bytes over the same links; HO-Ring moves some of them earlier.  A ring sends
(G-1)*S over each node's link in place of g*(N-1)*S, and leaves no node shard to keep.

Source: PaRO (Wu et al., 2023), section 3.4, for HO-Ring.
"""

from __future__ import annotations

from enum import Enum


class Algorithm(Enum):
    """How gathers go that cross between nodes; auto: as the cost model finds fastest for each bucket."""

    HIERARCHICAL = "hierarchical"
    HO_RING = "ho_ring"
    RING = "ring"
    AUTO = "auto"
