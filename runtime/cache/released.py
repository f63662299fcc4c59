"""Release frozen home shards from the device once the cache has their bucket; reading brings them back.

    home shard [S]  ==  slot n of the node shard [N*S] that the cache keeps, n being this rank's node

Graphs load the cached bucket: only saving, editing or unfreezing reads a frozen parameter (`home_shard`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from fcdp_compile.buckets import may_leave
from fcdp_compile.errors import FcdpError
from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.params.packing import unpack_grads
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.params.spec import Home
from fcdp_compile.plan import Bucket
from fcdp_compile.runtime.cache.host_cache import NodeShardCache


def release(
    bucket: Bucket,
    specs: Sequence[ParamSpec],
    parameters: Sequence[nn.Parameter],
    cache: NodeShardCache,
    home: Home,
) -> None:
    """Release the home shards of a bucket whose copy in the cache is valid; without a copy, none.

    specs, parameters: those of the bucket, in its order.  home: this rank among those that share one copy.
    """
    if (generation := cache.generation(bucket.id)) is None:
        return
    for spec, place, parameter in zip(specs, bucket.params, parameters, strict=True):
        if isinstance(parameter, HomeShard) and may_leave(spec, is_frozen=bucket.frozen):
            has_slot_of_each_node = bucket.slots_per_node_shard == bucket.nodes
            start = place.offset + home.node * bucket.slot_elements * has_slot_of_each_node
            parameter.release(partial(_values, cache, bucket.id, generation, start, spec, home))


def _values(
    cache: NodeShardCache, bucket_id: int, generation: int, start: int, spec: ParamSpec, home: Home
) -> Tensor:
    """A home shard, read from element `start` of the node shard."""
    node_shard = cache.node_shard(bucket_id, generation, home)
    if node_shard is None:
        raise FcdpError(
            f"the home shard of parameter {spec.name!r} was released and bucket {bucket_id}, which had its "
            "values, is gone; this is a bug in fcdp"
        )
    slot = node_shard.narrow(0, start, spec.layout.slot_elements)
    return unpack_grads(slot, [spec.layout], [spec.local_shape], [spec.home_dtype], home.node)[0]
