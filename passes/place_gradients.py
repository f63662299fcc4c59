"""Choose where accumulated gradients wait: arithmetic on bytes, no graph is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fcdp_compile.plan import Bucket, Tier
from fcdp_compile.strategy import GradientOn, Scope, Strategy


def place_gradients(
    buckets: Sequence[Bucket],
    strategy: Strategy,
    *,
    nodes: int,
    ranks_per_node: int,
    room_bytes: int | None,
) -> list[Bucket]:
    """The same buckets, of those whose gradients may wait on either side some with a place on the GPU.

    In order while there is room; so in a step that accumulates no rank takes more of its device than in one
    that does not, but for what the planned peak leaves free.

    room_bytes: what the device has left at the planned peak; None: as much as it takes.
    """
    if strategy.accumulates_on is not GradientOn.AUTO:
        return list(buckets)
    placed = []
    for bucket in buckets:
        size_bytes = gradient_bytes(bucket, strategy, nodes=nodes, ranks_per_node=ranks_per_node)
        fits = room_bytes is None or size_bytes <= room_bytes
        if bucket.gradient_tier is Tier.HOST and fits:
            bucket = replace(bucket, gradient_tier=Tier.GPU)
            room_bytes = None if room_bytes is None else room_bytes - size_bytes
        placed.append(bucket)
    return placed


def fit_gradients(
    buckets: Sequence[Bucket],
    strategy: Strategy,
    *,
    nodes: int,
    ranks_per_node: int,
    host_bytes: int,
) -> list[Bucket]:
    """The same buckets; those whose gradients host memory has no room for reduce every micro-batch's.

    Ranks come to the same, whatever each keeps on its GPU: what may wait on the host counts as if it did.

    host_bytes: what is left to gradients on each rank.
    """
    if not strategy.uses_host:
        return list(buckets)
    fitting = []
    for bucket in buckets:
        if bucket.gradient_tier is not Tier.NONE:
            size_bytes = gradient_bytes(
                bucket, strategy, nodes=nodes, ranks_per_node=ranks_per_node
            )
            if size_bytes > host_bytes:
                bucket = replace(bucket, gradient_tier=Tier.NONE)
            else:
                host_bytes -= size_bytes
        fitting.append(bucket)
    return fitting


def gradient_bytes(bucket: Bucket, strategy: Strategy, *, nodes: int, ranks_per_node: int) -> int:
    """Bytes on one rank of a bucket's accumulated gradients, in fp32 or wider."""
    ranks = nodes * (ranks_per_node if strategy.gradient is Scope.NONE else 1)
    return bucket.slot_elements * ranks * max(4, bucket.reduce_itemsize)
