"""Choose which cached node shards stay on the device: arithmetic on timelines, no graph is touched.

The cache of "FCDP: Fully Cached Data Parallel for Communication-Avoiding Large-Scale Training" (Park et al.)
keeps a node shard on the GPU while the memory in use is below a threshold tau, else on the host.  Here the
same is decided ahead from the predicted memory of the whole step; at run time `DeviceMemory` has the last
word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fcdp_compile.plan import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A bucket that is cached.

    bytes: what the device holds in addition while the bucket is kept there: its node shard, and home shards
    that could leave otherwise.  moved_bytes: what goes over the bus in a step if it is on the host instead.
    spans: when, as half-open ranges of positions in the timeline that `choose_tiers` is given.
    """

    bucket: int
    bytes: int
    moved_bytes: int
    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.moved_bytes < 0:
            raise ValueError(f"bucket {self.bucket} has a negative size: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where one bucket waits, and why."""

    bucket: int
    tier: Tier
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The choice for every bucket, in the order of the entries, and the peak that it comes to."""

    choices: tuple[Choice, ...]
    peak_bytes: int


def choose_tiers(
    entries: Sequence[Entry],
    alive_bytes: Sequence[int],
    *,
    static_bytes: int,
    capacity_bytes: int | None,
    threshold: float,
) -> Placement:
    """Keep node shards on the device as long as the predicted peak stays within the threshold.

        peak = static + max over positions of (alive + kept entries)  <=  threshold * capacity

    In the order of what most relieves the bus for each byte and position that it takes; the first that does
    not fit ends it, so that more memory never sends a bucket back to the host.  Where not even the step
    without a cache fits, everything is on the host, which is ZeRO-3's memory.

    alive_bytes: of a step with everything on the host, position by position.  static_bytes: what is there
    throughout.  capacity_bytes: the device's; None: not to be used for a cache.

    Raises: ValueError for a threshold outside of (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
    alive = [static_bytes + b for b in alive_bytes]
    limit = -1 if capacity_bytes is None else int(threshold * capacity_bytes)
    kept: dict[int, str] = {}
    refused = ""
    for entry in sorted(entries, key=_relief, reverse=True):
        after = _with(alive, entry)
        top = max(after, default=static_bytes)
        if top > limit:
            refused = _refusal(entry, top, limit, capacity_bytes)
            break
        alive = after
        kept[entry.bucket] = f"peak {_mib(top)} within {_mib(limit)}"
    choices = [
        Choice(bucket=e.bucket, tier=Tier.GPU, why=f"node shard stays on the gpu: {kept[e.bucket]}")
        if e.bucket in kept
        else Choice(bucket=e.bucket, tier=Tier.HOST, why=f"node shard on the host: {refused}")
        for e in entries
    ]
    return Placement(choices=tuple(choices), peak_bytes=max(alive, default=static_bytes))


def _relief(entry: Entry) -> tuple[float, int]:
    # Of equals the bucket used last, whose backward comes first.
    positions = sum(stop - start for start, stop in entry.spans)
    return entry.moved_bytes / max(1, entry.bytes * positions), entry.bucket


def _with(alive: Sequence[int], entry: Entry) -> list[int]:
    result = list(alive)
    for start, stop in entry.spans:
        for position in range(start, stop):
            result[position] += entry.bytes
    return result


def _refusal(entry: Entry, top: int, limit: int, capacity_bytes: int | None) -> str:
    if capacity_bytes is None:
        return "no device memory to use for a cache"
    return f"with bucket {entry.bucket} too the peak of {_mib(top)} would exceed {_mib(limit)}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"
