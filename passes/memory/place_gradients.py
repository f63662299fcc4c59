"""Choose where accumulated gradients wait: arithmetic on bytes, no graph is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fcdp_compile.plan import Bucket, Tier
from fcdp_compile.strategy import GradientOn, Scope


def place_gradients(
    buckets: Sequence[Bucket],
    *,
    room_bytes: int | None,
) -> list[Bucket]:
    """The same buckets, of those whose gradients may wait on either side some with a place on the GPU.

    In order while there is room; so in a step that accumulates no rank takes more of its device than in one
    that does not, but for what the planned peak leaves free.

    room_bytes: what the device has left at the planned peak; None: as much as it takes.
    """
    if room_bytes is not None:  # those of strategies without a choice take theirs in any case
        room_bytes -= sum(gradient_bytes(b) for b in buckets if b.gradient_tier is Tier.GPU)
    placed = []
    for bucket in buckets:
        size_bytes = gradient_bytes(bucket)
        may_choose = bucket.strategy.accumulates_on is GradientOn.AUTO
        fits = room_bytes is None or size_bytes <= room_bytes
        if bucket.gradient_tier is Tier.HOST and may_choose and fits:
            bucket = replace(bucket, gradient_tier=Tier.GPU)
            room_bytes = None if room_bytes is None else room_bytes - size_bytes
        placed.append(bucket)
    return placed


def fit_gradients(
    buckets: Sequence[Bucket],
    *,
    host_bytes: int,
) -> list[Bucket]:
    """The same buckets; those whose gradients host memory has no room for reduce every micro-batch's.

    Ranks come to the same, whatever each keeps on its GPU: what may wait on the host counts as if it did.

    host_bytes: what is left to gradients on each rank.
    """
    fitting = []
    for bucket in buckets:
        if bucket.gradient_tier is not Tier.NONE and bucket.strategy.uses_host:
            size_bytes = gradient_bytes(bucket)
            if size_bytes > host_bytes:
                bucket = replace(bucket, gradient_tier=Tier.NONE)
            else:
                host_bytes -= size_bytes
        fitting.append(bucket)
    return fitting


def gradient_bytes(bucket: Bucket) -> int:
    """Bytes on one rank of a bucket's accumulated gradients, in fp32 or wider."""
    is_whole = bucket.strategy.gradient is Scope.NONE
    slots = bucket.ranks if is_whole else bucket.nodes
    return bucket.slot_elements * slots * max(4, bucket.reduce_itemsize)
