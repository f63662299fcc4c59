"""Release frozen home shards from the device once the host has their bucket; reading brings them back.

    home shard [S] on the device  ==  slot n of the node shard [N*S] on the host, n being this rank's node

Graphs load the cached bucket: only saving, editing or unfreezing reads a frozen parameter (`home_shard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.params.packing import unpack_grads
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.plan import Bucket
from fcdp_compile.runtime.cache.host_cache import NodeShardCache
from fcdp_compile.strategy.formats import Format


def release(
    bucket: Bucket,
    specs: Sequence[ParamSpec],
    parameters: Sequence[nn.Parameter],
    cache: NodeShardCache,
    node: int,
) -> None:
    """Release the home shards of a bucket that is valid in the cache.

    specs, parameters: those of the bucket, in its order.  node: this rank's node.
    Nothing is released if the copy is not in host memory or is about to leave it, or has less precision.
    """
    if bucket.wire is not Format.FULL or cache.keeps_in_full(bucket):
        return
    dtype = getattr(torch, bucket.dtype)
    generation = cache.generation(bucket.id)
    if generation is None or not cache.has_host_copy(bucket.id, generation):
        return
    for spec, place, parameter in zip(specs, bucket.params, parameters, strict=True):
        if isinstance(parameter, HomeShard) and spec.home_dtype == dtype:
            has_slot_of_each_node = bucket.slots_per_node_shard == bucket.nodes
            start = place.offset + node * bucket.slot_elements * has_slot_of_each_node
            parameter.release(partial(_values, cache, bucket.id, generation, start, spec, node))


def _values(
    cache: NodeShardCache, bucket_id: int, generation: int, start: int, spec: ParamSpec, node: int
) -> Tensor:
    """A home shard, read from element `start` of the host's node shard."""
    node_shard = cache.host_copy(bucket_id, generation)
    if node_shard is None:
        raise FcdpError(
            f"the home shard of parameter {spec.name!r} was released and bucket {bucket_id}, which had its "
            "values on the host, is gone; this is a bug in fcdp"
        )
    slot = node_shard.narrow(0, start, spec.layout.slot_elements)
    return unpack_grads(slot, [spec.layout], [spec.local_shape], [spec.home_dtype], node)[0]
