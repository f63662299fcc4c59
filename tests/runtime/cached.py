"""Buckets and shards for a cache, and a cache on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from builders_plan import make_bucket, make_placement
from fcdp_compile.devices import Cpu
from fcdp_compile.params.spec import Home
from fcdp_compile.plan import Bucket, Placement, Tier
from fcdp_compile.runtime.cache.host_cache import NodeShardCache
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.strategy import Life

HOST = make_bucket(0, [("w", (4, 4))], dtype=("float32", 4), why="host")
GPU = replace(HOST, why="gpu")
FULL = replace(HOST, why="gpu-full")
OTHER = make_bucket(1, [("v", (8,))], dtype=("float32", 4), why="host")
"""One bucket in three placements, whose `why` names the placement; and another bucket."""

SHARD_BYTES = 8 * 4
CPU = torch.device("cpu")


class Cache(NodeShardCache):
    """A cache whose plan places each bucket that it is given as the bucket's reason says."""

    def __init__(self, counters: Counters, pool: PinnedPool, lanes: Lanes) -> None:
        self.plan: dict[int, Placement] = {}
        super().__init__(counters, pool, lanes, self.plan)

    def _placed(self, bucket: Bucket) -> Bucket:
        self.plan[bucket.id] = make_placement(bucket, tier=Tier(bucket.why))
        return bucket

    def store(self, bucket: Bucket, *values: Any) -> Any:
        return super().store(self._placed(bucket), *values)

    def make_room(self, bucket: Bucket) -> None:
        super().make_room(self._placed(bucket))

    def wants_in_full(self, bucket: Bucket) -> bool:
        return super().wants_in_full(self._placed(bucket))

    def agree_in_full(self, bucket: Bucket, home: Home, *, agreed: bool) -> None:
        super().agree_in_full(self._placed(bucket), home, agreed=agreed)


def until_backward(bucket: Bucket) -> Bucket:
    """The bucket with a strategy that keeps it only until the backward."""
    strategy = replace(bucket.strategy, life=Life.UNTIL_BACKWARD)
    return replace(bucket, strategy=strategy)


def make() -> tuple[NodeShardCache, Counters]:
    counters = Counters()
    lanes = Lanes(Cpu(), is_blocking=True)
    return Cache(counters, PinnedPool(Cpu()), lanes), counters


def shard(value: float) -> torch.Tensor:
    return torch.full((8,), float(value))
