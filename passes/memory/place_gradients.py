"""Choose where accumulated gradients wait: arithmetic on bytes, no graph is touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fcdp_compile.passes.graph.context import Use
from fcdp_compile.plan import Bucket, Placement, Tier
from fcdp_compile.strategy import GradientOn


def place_gradients(
    buckets: Sequence[Bucket], placements: Mapping[int, Placement], *, room_bytes: int | None
) -> dict[int, Placement]:
    """Move gradients that may wait on the GPU or the host to the GPU while it has room, in bucket order.

    So accumulating takes only device memory that the planned peak leaves free.

    placements: of these buckets and others, by number.  room_bytes: device memory left at the planned peak;
    None: no limit.
    """
    if room_bytes is not None:  # gradients without a choice take theirs in any case
        on_gpu = [b for b in buckets if placements[b.id].gradient_tier is Tier.GPU]
        room_bytes -= sum(b.waiting_gradient_bytes for b in on_gpu)
    placed = dict(placements)
    for bucket in buckets:
        size_bytes = bucket.waiting_gradient_bytes
        may_choose = bucket.strategy.accumulates_on is GradientOn.AUTO
        fits = room_bytes is None or size_bytes <= room_bytes
        if placed[bucket.id].gradient_tier is Tier.HOST and may_choose and fits:
            placed[bucket.id] = replace(placed[bucket.id], gradient_tier=Tier.GPU)
            room_bytes = None if room_bytes is None else room_bytes - size_bytes
    return placed


def fit_gradients(reduced: Sequence[Use], *, host_bytes: int) -> list[bool]:
    """Whether the gradients of each bucket wait; they do not if the host has no room for them.

    Gradients that may wait on the host count as if they did, so that all ranks decide alike, whatever each
    rank keeps on its GPU.

    host_bytes: host memory left for gradients on each rank.
    """
    waits = []
    for use in reduced:
        accumulates = use.placement.accumulates
        if accumulates and use.bucket.strategy.accumulates_on_host:
            size_bytes = use.bucket.waiting_gradient_bytes
            accumulates = size_bytes <= host_bytes
            host_bytes -= size_bytes if accumulates else 0
        waits.append(accumulates)
    return waits
