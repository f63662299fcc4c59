"""Buckets and shards for a cache, and a cache on a CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from builders_plan import make_bucket
from fcdp_compile.core.params.spec import Home
from fcdp_compile.devices import Cpu
from fcdp_compile.plan import Bucket, Tier
from fcdp_compile.runtime.buckets.bucket_cache import BucketCache
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.strategy import Life

HOST = make_bucket(0, [("w", (4, 4))], dtype=("float32", 4), why="host")
GPU = replace(HOST, why="gpu")
FULL = replace(HOST, why="gpu-full")
OTHER = make_bucket(1, [("v", (8,))], dtype=("float32", 4), why="host")
"""One bucket in three placements, whose `why` names the placement; and another bucket."""

SHARD_BYTES = 8 * 4
CPU = torch.device("cpu")


class Cache:
    """The caches of some buckets; a bucket's reason names the tier where its plan wants it."""

    def __init__(self, counters: Counters, pool: PinnedPool, lanes: Lanes) -> None:
        self.transport: Any = SimpleNamespace(
            counters=counters, pool=pool, lanes=lanes, device_memory=None
        )
        self._of: dict[int, BucketCache] = {}

    def of(self, bucket: Bucket) -> BucketCache:
        return self._of.setdefault(bucket.id, BucketCache(bucket, self.transport))

    def store(self, bucket: Bucket, node_shard: Any, generation: int) -> Pending:
        return self.of(bucket).store(Tier(bucket.why), node_shard, generation)

    def load(self, bucket: Bucket, generation: int) -> Pending:
        return self.of(bucket).load(generation)

    def make_room(self, bucket: Bucket) -> None:
        self.of(bucket).make_room()

    def wants_in_full(self, bucket: Bucket) -> bool:
        return self.of(bucket).wants_in_full(Tier(bucket.why))

    def agree_in_full(self, bucket: Bucket, home: Home, *, agreed: bool) -> None:
        self.of(bucket).agree_in_full(Tier(bucket.why), home, agreed=agreed)

    def host_bytes(self) -> int:
        return sum(cache.host_bytes for cache in self._of.values())

    @property
    def fallen_back(self) -> int:
        return sum(cache.has_fallen_back for cache in self._of.values())


def until_backward(bucket: Bucket) -> Bucket:
    """The bucket with a strategy that keeps it only until the backward."""
    strategy = replace(bucket.strategy, life=Life.UNTIL_BACKWARD)
    return replace(bucket, strategy=strategy)


def make() -> tuple[Cache, Counters]:
    counters = Counters()
    lanes = Lanes(Cpu(), is_blocking=True)
    return Cache(counters, PinnedPool(Cpu()), lanes), counters


def shard(value: float) -> torch.Tensor:
    return torch.full((8,), float(value))
