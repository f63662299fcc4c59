"""A bucket at run time: the one object that gathers, keeps, loads and reduces the parameters of a bucket.

    home shards -> pack [S] -> gather between nodes [N*S] -> gather within the node [G*S] -> parameters
                                                  |  ^
                                            store v  | load                 the bucket's copy (`cache`)
    gradients   -> pack [G*S] -> reduce -> [S] -> gradient shards

Programs, seams, gradients that wait and reads outside of graphs all move buckets by these methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.core.params.packing import (
    pack_grads,
    pack_home,
    padded,
    unpack_full,
    unpack_grads,
)
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import may_leave
from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import Bucket, Kind, Placement
from fcdp_compile.plan.kinds import FETCHES, REDUCING
from fcdp_compile.plan.reduction import REDUCTIONS, waits_before
from fcdp_compile.runtime.buckets.bucket_cache import BucketCache
from fcdp_compile.runtime.buckets.transport import Transport
from fcdp_compile.runtime.lanes.lanes import range_name
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.runtime.parameters.record import Generations, ParamRecord
from fcdp_compile.strategy import Scope


class BoundBucket:
    """A bucket of one model, and where one plan lets it wait.

    records: its parameters, in its order.  cache: shared with the other plans that have this bucket.
    """

    def __init__(
        self,
        bucket: Bucket,
        placement: Placement,
        records: Sequence[ParamRecord],
        cache: BucketCache,
        generations: Generations,
        transport: Transport,
    ) -> None:
        self.bucket = bucket
        self.placement = placement
        self.records = records
        self.cache = cache
        self.keys = [r.spec.key for r in records]
        self.home = transport.topology.home(bucket.strategy.home)
        self._layouts = [p.layout for p in bucket.params]
        self.dtype: torch.dtype = getattr(torch, bucket.dtype)  # of gathers and of the copy
        self._reduce_dtype: torch.dtype = getattr(torch, bucket.reduce_dtype)
        # Once, not in every step.
        self._sizes = bucket.sizes()
        self._names = {kind: range_name(kind, bucket) for kind in FETCHES | REDUCING}
        self._generations = generations
        self._transport = transport
        self._collectives = transport.collectives

    @property
    def id(self) -> int:
        """Its number in the plans; -1 if no plan has it (`ModelBuckets.alone`)."""
        return self.bucket.id

    @property
    def is_planned(self) -> bool:
        """Whether a plan has it; else it is a parameter that is used outside of graphs."""
        return self.bucket.id >= 0

    @property
    def generation(self) -> int:
        """The generation of its parameters' values (`validity`)."""
        return self._generations.of(self.keys)

    @property
    def lives(self) -> bool:
        """Whether the model still has all of its parameters."""
        return all(r.lives for r in self.records)

    @property
    def is_at_home(self) -> bool:
        """Whether all of its parameters are home shards now; none was removed or is whole for a while."""
        places = [record.places() for record in self.records]
        return all(found and isinstance(found[0], HomeShard) for found in places)

    # --- gathers ------------------------------------------------------------------------------------------

    def packed(self, shards: Sequence[Tensor] | None = None) -> Tensor:
        """The home buffer [S] of these shards; by default of the model's own, which are brought back."""
        if shards is None:
            shards = [r.local() for r in self.records]
        return pack_home(shards, self._layouts, self.dtype, self._collectives.node)

    def gather(self, kind: Kind, *parts: Tensor | Pending) -> Pending:
        """Start one step of a gather; `parts` are the inputs of the op of this kind (`fcdp_compile.ops`)."""
        start, name = self._collectives, self._names[kind]
        if kind is Kind.INTRA_REST_ALL_GATHER:
            node_shard, own = parts
            return start.rest_all_gather(kind, node_shard, own, name)
        (part,) = parts
        if kind is Kind.INTRA_ALL_GATHER:
            return start.all_gather(kind, part, name)
        codec = self.cache.codecs.of_weights
        if kind is Kind.INTRA_OWN_ALL_GATHER:
            return start.own_all_gather(kind, part, name, codec=codec)
        assert kind is Kind.INTER_ALL_GATHER, kind
        if (agreed := self.cache.reference(self.home)) is not None:
            code, before = agreed
            return start.difference_all_gather(kind, part, before, code, name, sizes=self._sizes)
        return start.all_gather(kind, part, name, codec=codec, sizes=self._sizes)

    def gathered(self, home: Tensor) -> list[Tensor]:
        """Gather a home buffer [S] at once, level by level; returns the parameters."""
        pending = Pending(home)
        if self.bucket.nodes > 1:
            pending = self.gather(Kind.INTER_ALL_GATHER, pending)
        if self.bucket.ranks_per_node > 1:
            pending = self.gather(Kind.INTRA_ALL_GATHER, pending)
        return unpack_full(pending.wait(), self._layouts)

    def load_home(self, shards: Sequence[Tensor]) -> Pending:
        """Start to load the home buffer [S] of home shards in host memory."""
        return self._transport.home_transfers.load(self.bucket, shards)

    # --- the copy -----------------------------------------------------------------------------------------

    def store(self, node_shard: Tensor | Pending, generation: int) -> Pending:
        """Keep a node shard [N*S] of this generation where the plan wants it."""
        return self.cache.store(self.placement.tier, node_shard, generation)

    def load(self, generation: int) -> Pending:
        """The node shard [N*S] of this generation, or the whole bucket [G*S], on the device.

        Raises: StaleParameterError if the copy is gone or of another generation.
        """
        loaded = self.cache.load(generation)
        self.cache.make_room()
        return loaded

    def params_of_copy(self, keys: Sequence[str]) -> list[Tensor]:
        """Some whole parameters out of the copy, which is valid; each in new memory."""
        bucket = self.bucket
        pending = self.cache.load(self.generation)
        count = bucket.slots if pending.is_full else bucket.slots_per_node_shard
        is_whole = bucket.ranks_per_node == 1 or pending.is_full
        slots = pending.wait().view(count, bucket.slot_elements)
        found = []
        for key in keys:
            place = bucket.params[self.keys.index(key)]
            rows = slots.narrow(1, place.offset, place.layout.slot_elements)
            if is_whole:  # the cache's copy must not be returned
                whole = rows.clone(memory_format=torch.contiguous_format).view(-1)
            else:
                whole = self.gather(Kind.INTRA_ALL_GATHER, rows.reshape(-1)).wait()
            found.append(unpack_full(whole, [place.layout])[0])
        return found

    def refresh(self) -> None:
        """Gather the bucket between nodes straight into its copy; within the node too if it is kept whole.

        Frozen home shards that the copy of a planned bucket contains leave the device.
        """
        transfers = self._transport.home_transfers
        shards = [transfers.shard_to_device(r.spec, r.peek()) for r in self.records]
        home = self.packed(shards)
        if self.bucket.frozen and any(home.data_ptr() == s.data_ptr() for s in shards):
            # A group's own thread holds the tensor that it sent until a little after the gather, and a shard
            # that anything else holds cannot be released.
            home = home.clone()
        del shards
        node_shard = Pending(home) if self.bucket.nodes == 1 else self._of_all_nodes(home)
        generation = self.generation
        stored = self.store(node_shard, generation)
        if self.is_planned:  # others may lose their copy at any time (`runtime.outside`)
            self.release_shards()
        if self.cache.keeps_in_full:
            stored = self.gather(Kind.INTRA_ALL_GATHER, stored)
            self.cache.keep_full(stored, generation)
        stored.wait()

    def _of_all_nodes(self, home: Tensor) -> Pending:
        """The node shard: read on this node if possible, else gathered between nodes."""
        specs, sources = [r.spec for r in self.records], self._transport.row_sources
        read = sources.node_shard(self.bucket, specs, home, self.home, self._collectives)
        return self.gather(Kind.INTER_ALL_GATHER, home) if read is None else Pending(read)

    def give_up(self) -> None:
        """Release the copy, which no graph will load any more."""
        for record in self.records:
            record.local()  # brings back shards that only the copy has
        self.cache.drop()

    def release_shards(self) -> None:
        """Release frozen home shards from the device if the copy is valid; reading brings them back.

            home shard [S]  ==  slot n of the node shard [N*S] of the copy, n being this rank's node

        Graphs load the copy: only saving, editing or unfreezing reads a frozen parameter (`home_shard`).
        """
        if (generation := self.cache.generation) is None:
            return
        for record, start in self._in_copy:
            parameter = record.parameter()
            if isinstance(parameter, HomeShard):
                parameter.release(partial(self._released, generation, start, record.spec))

    @cached_property
    def _in_copy(self) -> list[tuple[ParamRecord, int]]:
        """The parameters whose home shards the copy contains, and where these begin in the node shard."""
        bucket = self.bucket
        slots_before = self.home.node if bucket.slots_per_node_shard == bucket.nodes else 0
        return [
            (record, place.offset + slots_before * bucket.slot_elements)
            for record, place in zip(self.records, bucket.params, strict=True)
            if may_leave(replace(record.spec, gather_dtype=self.dtype), is_frozen=bucket.frozen)
        ]

    def _released(self, generation: int, start: int, spec: ParamSpec) -> Tensor:
        """A home shard, read from element `start` of the node shard."""
        node_shard = self.cache.node_shard(generation, self.home)
        if node_shard is None:
            raise FcdpError(
                f"the home shard of parameter {spec.name!r} was released and bucket {self.id}, which had its "
                "values, is gone; this is a bug in fcdp"
            )
        slot = node_shard.narrow(0, start, spec.layout.slot_elements)
        return _shards_in(slot, [spec], self.home.node)[0]

    # --- gradients ----------------------------------------------------------------------------------------

    def packed_grad(self, grad: Tensor) -> Tensor:
        """The full gradient of a bucket of one parameter as slots [G*S]."""
        bucket = self.bucket
        flat = pack_grads([grad], self._layouts, self._reduce_dtype)
        is_whole = bucket.strategy.home is Scope.NONE
        return padded(flat, self._collectives.ranks_per_node) if is_whole else flat

    def reduce(
        self, kind: Kind, grads: Tensor | Pending, params: tuple[str, ...] | None = None
    ) -> Pending:
        """Start one step of the reduction of gradients.

        params: the names of the parameters that have a gradient, in the bucket's order; None: all.
        """
        codec = sizes = None
        if kind is Kind.INTER_REDUCE_SCATTER:
            params = tuple(p.name for p in self.bucket.params) if params is None else params
            codec, sizes = self.cache.codecs.of_gradients(params), self.bucket.sizes(params)
        name = self._names[kind]
        return self._collectives.reduction(
            kind, grads, name, dtype=self._reduce_dtype, codec=codec, sizes=sizes
        )

    def reduced(
        self, kinds: Iterable[Kind], grads: Pending, params: tuple[str, ...] | None = None
    ) -> Pending:
        """Reduce gradients at once, by some steps of `reductions`."""
        for kind in kinds:
            grads = self.reduce(kind, grads, params)
        return grads

    @property
    def reductions(self) -> tuple[list[Kind], list[Kind]]:
        """The steps of a reduction before gradients of micro-batches wait, and after."""
        strategy = self.bucket.strategy
        kinds = REDUCTIONS[strategy.home]
        waits = [i for i, kind in enumerate(kinds) if waits_before(kind, strategy.gradient)]
        at = waits[0] if waits else len(kinds)
        several = {kind for kind in kinds if self._collectives.group_size(kind) > 1}
        return [k for k in kinds[:at] if k in several], [k for k in kinds[at:] if k in several]

    def grad_shards(self, slot: Tensor, params: tuple[str, ...] | None = None) -> list[Tensor]:
        """The gradient shards of the parameters in a reduced slot [S]; params: as for `reduce`."""
        specs = [r.spec for r in self.records if params is None or r.spec.name in params]
        return _shards_in(slot, specs, self._collectives.node)

    def store_grads(self, grads: Tensor | Pending, dtype: torch.dtype) -> Pending:
        """Start to copy reduced gradients to host memory, in the dtype of the home shards."""
        return self._transport.home_transfers.store(self.bucket, grads, dtype)


def _shards_in(slot: Tensor, specs: Sequence[ParamSpec], node: int) -> list[Tensor]:
    layouts, shapes = [s.layout for s in specs], [s.local_shape for s in specs]
    return unpack_grads(slot, layouts, shapes, [s.home_dtype for s in specs], node)


def shards_in_copy(bucket: BoundBucket, spec: ParamSpec) -> list[Tensor] | None:
    """The home shards of this rank's place on every node, read in a bucket's copy where it is kept.

    spec: of one of its parameters.  None if the copy is outdated, or has no exact values of all nodes.
    """
    home, planned = bucket.home, bucket.bucket
    node_shard = bucket.cache.node_shard(bucket.generation, home)
    has_all = planned.slots_per_node_shard == home.nodes and bucket.dtype == spec.home_dtype
    if node_shard is None or not has_all or not planned.wire.is_exact:
        return None
    start = next(p.offset for p in planned.params if p.name == spec.name)
    slots = node_shard.view(home.nodes, -1).narrow(1, start, spec.layout.slot_elements)
    shapes = [spec.layout.local_shape(node, home.place) for node in range(home.nodes)]
    return [
        unpack_grads(slot, [spec.layout], [shape], [spec.home_dtype], node)[0]
        for node, (slot, shape) in enumerate(zip(slots, shapes, strict=True))
    ]
