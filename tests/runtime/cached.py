"""Buckets and shards for a cache, and a cache on a CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from builders_plan import make_bucket, make_placement
from fcdp_compile.devices import Cpu
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
    """A cache that takes each bucket's placement from the bucket."""

    def __init__(self, counters: Counters, pool: PinnedPool, lanes: Lanes) -> None:
        self.plan: dict[int, Placement] = {}
        super().__init__(counters, pool, lanes, self.plan)

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("store", "agree_in_full", "make_room", "wants_in_full"):
            return found

        def call(bucket: Bucket, *args: Any, **more: Any) -> Any:
            self.plan[bucket.id] = make_placement(bucket, tier=Tier(bucket.why))
            return found(bucket, *args, **more)

        return call


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
