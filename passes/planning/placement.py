"""Choose where buckets and gradients wait, and the device memory that a step then takes.

Both the backend and the planner use this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fcdp_compile.passes.memory.choose_tiers import choose_tiers, place_steps
from fcdp_compile.passes.memory.place_gradients import place_gradients
from fcdp_compile.passes.memory.predict import StepMemory, fixed_bytes
from fcdp_compile.passes.pipeline import Lowered
from fcdp_compile.passes.planning.book import BucketBook
from fcdp_compile.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The device memory for a cache.

    capacity_bytes: the device's memory; None: no cache on the device.  threshold: the fraction of
    capacity_bytes that may be used.  taken_bytes: bytes in use for other things.  device_type: the type of
    the device on which graphs were traced.  accumulates: whether a step has several micro-batches, or may
    have.
    """

    capacity_bytes: int | None
    threshold: float
    taken_bytes: int = 0
    device_type: str = "cpu"
    accumulates: bool = True


def place_all(
    step: StepMemory,
    lowered: Lowered,
    book: BucketBook,
    room: Room,
    *,
    nodes: int,
    ranks_per_node: int,
    number: int,
) -> Plan:
    """Choose all placements for the predicted memory of a step; return the plan of the lowered graphs.

    book: gets the bytes that the plan keeps on the device.
    """
    buckets = tuple(use.bucket for use in lowered.placed)
    placements = {use.bucket.id: use.placement for use in lowered.placed}
    taken_bytes = room.taken_bytes + book.device_bytes_of_others(buckets)
    chosen = choose_tiers(
        step.entries,
        step.alive_bytes,
        static_bytes=step.static_bytes + taken_bytes,
        capacity_bytes=room.capacity_bytes,
        threshold=room.threshold,
    )
    limit_bytes = left_bytes = None
    if room.capacity_bytes is not None:
        limit_bytes = int(room.threshold * room.capacity_bytes)
        left_bytes = max(0, limit_bytes - chosen.peak_bytes)
    for choice in chosen.choices:
        before = placements[choice.bucket]
        placements[choice.bucket] = replace(before, tier=choice.tier, why=choice.why)
    placements = place_gradients(buckets, placements, room_bytes=left_bytes)
    memory = step.by_step(chosen.used_bytes)
    schedules = [
        replace(place_steps(s, placements), memory_bytes=memory.get((s.direction, s.variant), ()))
        for s in lowered.schedules
    ]
    kept_bytes = {b.id: fixed_bytes(b, placements[b.id]) for b in buckets}
    kept_bytes |= {
        e.bucket: e.bytes_in(c.tier) for e, c in zip(step.entries, chosen.choices, strict=True)
    }
    book.keep_on_device(kept_bytes)
    return Plan(
        strategy=", ".join(dict.fromkeys(b.strategy.name for b in buckets)),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        graph=number,
        buckets=buckets,
        placements=tuple(placements.values()),
        refresh=lowered.refresh,
        schedules=tuple(schedules),
        peak_bytes=chosen.peak_bytes,
        memory_limit_bytes=limit_bytes,
    )
