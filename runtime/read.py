"""Read one parameter as a whole outside of compiled graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from fcdp_compile.params.packing import unpack_full
from fcdp_compile.plan import Bucket, Kind
from fcdp_compile.runtime.collectives.agreement import About
from fcdp_compile.runtime.eager import gathers
from fcdp_compile.runtime.lanes.lanes import range_name
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.strategy.formats import Format


def read(model: ShardedModel, key: str, shard: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole parameter `key`, exactly, in new memory; every rank must call it.

    If the cache has a valid copy of the parameter's bucket, the whole bucket is loaded, and nothing is sent
    between nodes.  Else the parameter is gathered by itself.

    shard: this rank's home shard.  dtype: of the result.

    Raises: PlanMismatchError on every rank if ranks are about to do different things; FcdpError if parameters
    have no values yet.
    """
    model.unset.refuse("reading a parameter")
    bucket = _cached(model, key, dtype)
    if bucket is None:
        return model.gather(key, shard, dtype)
    act = gathers(model.spec(key))
    about = About(digest="", mode=act, describe=lambda: act)
    if model.validity.check([bucket], about).stale[bucket.id]:
        return model.gather(key, shard, dtype)
    pending = model.cache.load(bucket, model.validity.generation(bucket))
    if bucket.ranks_per_node > 1 and not pending.is_full:
        kind = Kind.INTRA_ALL_GATHER
        pending = model.collectives.all_gather(kind, pending, range_name(kind, bucket))
    whole = unpack_full(pending.wait(), [p.layout for p in bucket.params])
    return whole[model.records.keys_of(bucket).index(key)].clone()


def _cached(model: ShardedModel, key: str, dtype: torch.dtype) -> Bucket | None:
    """A cached bucket with exact values of a parameter; the same bucket on all ranks."""
    spec = model.spec(key)
    if spec.layout.nodes == 1 or spec.gather_dtype is not dtype:
        return None
    for bucket in model.known_buckets().get(key, ()):
        is_kept = bucket.strategy.is_resident and model.cache.generation(bucket.id) is not None
        if is_kept and bucket.wire is Format.FULL:
            return bucket
    return None
