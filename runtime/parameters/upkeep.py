"""Upkeep of the cache outside of graphs: fill it by gathers, and release home shards that it has."""

from __future__ import annotations

import torch
from torch import Tensor

from fcdp_compile.params.mesh import Topology
from fcdp_compile.params.packing import pack_home
from fcdp_compile.plan import Bucket, Kind
from fcdp_compile.runtime.cache.codecs import Codecs
from fcdp_compile.runtime.cache.home_transfers import shard_to_device
from fcdp_compile.runtime.cache.host_cache import NodeShardCache
from fcdp_compile.runtime.cache.released import release
from fcdp_compile.runtime.cache.row_sources import RowSources
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.lanes.lanes import range_name
from fcdp_compile.runtime.lanes.pending import Pending
from fcdp_compile.runtime.parameters.record import Records
from fcdp_compile.runtime.parameters.validity import Validity


class CacheUpkeep:
    """Keeps a model's cache in order before a graph runs.

    row_sources: where rows of other nodes can be read.
    """

    def __init__(
        self,
        topology: Topology,
        records: Records,
        validity: Validity,
        cache: NodeShardCache,
        collectives: Collectives,
        codecs: Codecs,
    ) -> None:
        self.row_sources = RowSources()
        self._topology = topology
        self._records = records
        self._validity = validity
        self._cache = cache
        self._collectives = collectives
        self._codecs = codecs

    def refresh(self, bucket: Bucket) -> None:
        """Gather a bucket between nodes straight into the cache; within the node too if it is kept whole.

        Frozen home shards that the copy of a graph's bucket contains leave the device.
        """
        dtype, device = getattr(torch, bucket.dtype), self._collectives.device
        counters = self._collectives.counters
        shards = [
            shard_to_device(r.spec, r.peek(), device, counters) for r in self._records.of(bucket)
        ]
        home = pack_home(shards, [p.layout for p in bucket.params], dtype, self._topology.node)
        if bucket.frozen and any(home.data_ptr() == s.data_ptr() for s in shards):
            # A group's own thread holds the tensor that it sent until a little after the gather, and a shard
            # that anything else holds cannot be released.
            home = home.clone()
        del shards
        node_shard = Pending(home)
        if bucket.nodes > 1:
            node_shard = self._of_all_nodes(bucket, home)
        generation = self._validity.generation(bucket)
        stored = self._cache.store(bucket, node_shard, generation)
        if bucket.id >= 0:  # others may lose their copy at any time (`runtime.outside`)
            self.release_shards(bucket)
        if self._cache.keeps_in_full(bucket):
            kind = Kind.INTRA_ALL_GATHER
            full = self._collectives.all_gather(kind, stored, range_name(kind, bucket))
            self._cache.keep_full(bucket, generation, full)
            stored = full
        stored.wait()

    def _of_all_nodes(self, bucket: Bucket, home: Tensor) -> Pending:
        """The node shard of a bucket: read on this node if possible, else gathered between nodes."""
        specs = [r.spec for r in self._records.of(bucket)]
        at = self._topology.home(bucket.strategy.home)
        read = self.row_sources.node_shard(bucket, specs, home, at, self._collectives)
        if read is not None:
            return Pending(read)
        kind = Kind.INTER_ALL_GATHER
        codec = self._codecs.of_weights(bucket)
        name = range_name(kind, bucket)
        return self._collectives.all_gather(kind, home, name, codec=codec, sizes=bucket.sizes())

    def give_up(self, bucket: Bucket) -> None:
        """Release the cached copy of a bucket that no graph will load any more."""
        self._records.shards(bucket)  # brings back shards that only the copy has
        self._cache.drop(bucket.id)

    def release_shards(self, bucket: Bucket) -> None:
        """Release the device memory of the home shards of a bucket that is valid in the cache."""
        records = self._records.of(bucket)
        specs, parameters = [r.spec for r in records], [r.parameter() for r in records]
        home = self._topology.home(bucket.strategy.home)
        release(bucket, specs, parameters, self._cache, home)
