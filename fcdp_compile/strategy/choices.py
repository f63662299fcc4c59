"""The values of a strategy's choices."""

from __future__ import annotations

from enum import Enum


class Scope(Enum):
    """How widely something is sharded."""

    NONE = "none"
    INTRA = "intra"
    GLOBAL = "global"


class Cache(Enum):
    """Where a gathered node shard waits for its next use; gpu-full: the whole bucket.

    Adaptive: a bucket for which the host has no room is not kept.  Any other bucket waits on the GPU while
    the GPU has room, else on the host; on the GPU it waits as a whole bucket while there is room for that.
    """

    NONE = "none"
    GPU = "gpu"
    GPU_FULL = "gpu-full"
    HOST = "host"
    ADAPTIVE = "adaptive"


class GradientOn(Enum):
    """Where accumulated gradients wait; auto: on the GPU while the planned step leaves room for them."""

    AUTO = "auto"
    GPU = "gpu"
    HOST = "host"


class Life(Enum):
    """How long a cached node shard is kept."""

    UNTIL_BACKWARD = "until-backward"
    UNTIL_CHANGED = "until-changed"


class Algorithm(Enum):
    """How home shards are gathered between N nodes of g ranks, into full parameters.

        hierarchical   inter-node all-gather [N*S], then intra-node all-gather [G*S]
        ho_ring        inter-node all-gather [N*S] | intra-node all-gather of this node's own shards [g*S],
                       then intra-node all-gather of the other nodes' shards [(N-1)*g*S]

    Both move the same bytes over the same links; HO-Ring moves some of them earlier.

    Source: PaRO (Wu et al., 2023), section 3.4, for HO-Ring.
    """

    HIERARCHICAL = "hierarchical"
    HO_RING = "ho_ring"
