"""Choose which cached buckets stay on the device: arithmetic on timelines, no graph is touched.

The cache of "FCDP: Fully Cached Data Parallel for Communication-Avoiding Large-Scale Training" (Park et al.)
keeps a node shard on the GPU while the memory in use is below a threshold tau, else on the host.  Here this
is decided at compile time, from the predicted memory of the whole step; at run time `BucketCache` can
overrule it.  If there is more room, whole buckets stay, and are not gathered again within the node either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan import Kind, Placement, Schedule, Step, Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A bucket that is cached.

    bytes: device memory that is needed if the node shard stays on the device.
    moved_bytes: bytes over the bus in a step if the node shard is on the host.
    full_bytes: further device memory for keeping the whole bucket; None if it cannot be kept.
    spread_bytes: bytes that this rank sends within the node in a step if the whole bucket is not kept.
    spans: when it is kept, as half-open ranges of positions in the timeline that `choose_tiers` is given.
    """

    bucket: int
    bytes: int
    moved_bytes: int
    spans: tuple[tuple[int, int], ...]
    full_bytes: int | None = None
    spread_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.bytes, self.moved_bytes, self.full_bytes or 0, self.spread_bytes) < 0:
            raise ArgumentError(f"bucket {self.bucket} has a negative size: {self}")

    def bytes_in(self, tier: Tier) -> int:
        """Device memory for keeping the bucket in `tier`."""
        if tier is Tier.GPU_FULL:
            assert self.full_bytes is not None
            return self.bytes + self.full_bytes
        return self.bytes if tier is Tier.GPU else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where one bucket waits, and why."""

    bucket: int
    tier: Tier
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The choice for every bucket, in the order of the entries, and the memory that is then in use.

    used_bytes: all bytes in use, for each position.
    """

    choices: tuple[Choice, ...]
    used_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at any position."""
        return max(self.used_bytes)


def choose_tiers(
    entries: Sequence[Entry],
    alive_bytes: Sequence[int],
    *,
    static_bytes: int,
    capacity_bytes: int | None,
    threshold: float,
) -> Choices:
    """Keep node shards on the device, and then whole buckets, while the peak is within the threshold.

        peak = static + max over positions of (alive + kept entries)  <=  threshold * capacity

    Node shards go first; the first of them saves the most bytes on the bus for each byte and position that
    it takes.  If all node shards fit, whole buckets follow; the first of them saves the most bytes on the
    node's own links.  The choice stops at the first misfit: with more memory no bucket then waits farther
    away.  If not even the step without a cache fits, everything is on the host, and the
    device memory is ZeRO-3's.

    alive_bytes: bytes in use at each position of a step with everything on the host.  static_bytes: further
    bytes, in use at all positions.  capacity_bytes: the device's memory; None: no device memory for a cache.

    Raises: ValueError for a threshold outside of (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ArgumentError(f"threshold must be above 0 and at most 1, not {threshold}")
    room = _Room(
        [static_bytes + b for b in alive_bytes] or [static_bytes], capacity_bytes, threshold
    )
    chosen = {
        e.bucket: Choice(bucket=e.bucket, tier=Tier.HOST, why=_WAITS[Tier.HOST]) for e in entries
    }
    if _fill(room, Tier.GPU, sorted(entries, key=_bus_relief, reverse=True), chosen):
        whole = [e for e in entries if e.full_bytes is not None]
        _fill(room, Tier.GPU_FULL, sorted(whole, key=_link_relief, reverse=True), chosen)
    return Choices(choices=tuple(chosen.values()), used_bytes=tuple(room.alive))


def _fill(room: _Room, tier: Tier, entries: Sequence[Entry], chosen: dict[int, Choice]) -> bool:
    """Move entries to a tier in order; return whether all fit.  Entries that do not fit get the reason."""
    for i, entry in enumerate(entries):
        size = entry.bytes_in(tier) - entry.bytes_in(chosen[entry.bucket].tier)
        if refused := room.take(entry, size):
            for left in entries[i:]:
                now = chosen[left.bucket]
                chosen[left.bucket] = replace(now, why=f"{_WAITS[now.tier]}: {refused}")
            return False
        why = f"{_WAITS[tier]}: peak {_mib(room.peak)} within {_mib(room.limit)}"
        chosen[entry.bucket] = Choice(bucket=entry.bucket, tier=tier, why=why)
    return True


_WAITS = {
    Tier.HOST: "node shard on the host",
    Tier.GPU: "node shard stays on the gpu",
    Tier.GPU_FULL: "stays on the gpu in full",
}


class _Room:
    """The device's memory position by position, and the limit that no position may exceed."""

    def __init__(self, alive: list[int], capacity_bytes: int | None, threshold: float) -> None:
        self.alive = alive
        self._capacity_bytes = capacity_bytes
        self.limit = -1 if capacity_bytes is None else int(threshold * capacity_bytes)

    @property
    def peak(self) -> int:
        return max(self.alive)

    def take(self, entry: Entry, size: int) -> str:
        """Take `size` bytes during the entry's spans; return why they cannot be taken, or nothing."""
        after = list(self.alive)
        for start, stop in entry.spans:
            for position in range(start, stop):
                after[position] += size
        if (top := max(after)) <= self.limit:
            self.alive = after
            return ""
        if self._capacity_bytes is None:
            return "no device memory to use for a cache"
        return f"with bucket {entry.bucket} too the peak of {_mib(top)} would exceed {_mib(self.limit)}"


# Of equal entries, the bucket that is used last comes first: its backward is first.
def _bus_relief(entry: Entry) -> tuple[float, int]:
    return entry.moved_bytes / max(1, entry.bytes * _positions(entry)), entry.bucket


def _link_relief(entry: Entry) -> tuple[float, int]:
    return entry.spread_bytes / max(1, (entry.full_bytes or 0) * _positions(entry)), entry.bucket


def _positions(entry: Entry) -> int:
    return sum(stop - start for start, stop in entry.spans)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def place_steps(schedule: Schedule, placements: Mapping[int, Placement]) -> Schedule:
    """The schedule with 0 bytes for steps that move nothing, because the bucket is where it is used."""
    new = (Kind.INTER_ALL_GATHER, Kind.STORE)
    gathered = {s.bucket for s in schedule.steps if s.kind in new}
    steps = tuple(
        replace(s, bytes=0)
        if s.bucket is not None and _stays(s, placements[s.bucket], is_new=s.bucket in gathered)
        else s
        for s in schedule.steps
    )
    return replace(schedule, steps=steps)


def _stays(step: Step, placement: Placement, *, is_new: bool) -> bool:
    if step.kind in (Kind.ACCUMULATE, Kind.COLLECT):
        return placement.gradient_tier is Tier.GPU
    if step.kind in (Kind.STORE, Kind.LOAD):
        return placement.tier in (Tier.GPU, Tier.GPU_FULL)
    is_whole = placement.tier is Tier.GPU_FULL
    return step.kind is Kind.INTRA_ALL_GATHER and is_whole and not is_new
