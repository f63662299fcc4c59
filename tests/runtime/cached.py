"""Buckets and shards for a cache, and a cache on a CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from builders_plan import make_bucket
from fcdp_compile.devices import Cpu
from fcdp_compile.plan import Bucket, Tier
from fcdp_compile.runtime.cache.host_cache import NodeShardCache
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.strategy import Life

HOST = make_bucket(0, [("w", (4, 4))], dtype=("float32", 4))
GPU = replace(HOST, tier=Tier.GPU)
FULL = replace(HOST, tier=Tier.GPU_FULL)
OTHER = make_bucket(1, [("v", (8,))], dtype=("float32", 4))
SHARD_BYTES = 8 * 4
CPU = torch.device("cpu")


def until_backward(bucket: Bucket) -> Bucket:
    """The bucket with a strategy that keeps it no longer."""
    strategy = replace(bucket.strategy, life=Life.UNTIL_BACKWARD)
    return replace(bucket, strategy=strategy)


def make() -> tuple[NodeShardCache, Counters]:
    counters = Counters()
    lanes = Lanes(Cpu(), is_blocking=True)
    return NodeShardCache(counters, PinnedPool(Cpu()), lanes), counters


def shard(value: float) -> torch.Tensor:
    return torch.full((8,), float(value))
