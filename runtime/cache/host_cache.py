"""The cache: node shards in pinned host memory or on the device, or whole buckets on the device.

A bucket has at most one copy, of one generation: where its plan wants it, or on the host if the device has no
room.  Host slabs have the exact size.  A bucket writes to its slab again and again, until its copies go to
the device or it is dropped: a new slab for each step would be registered in each step.  `load` reads a copy
and does not move it; `make_room` moves it.

[Note: full parameters] If there is room, the device keeps the whole gathered bucket, which then is not
gathered again within the node either.  All ranks of a node must leave out this all-gather, or none, so ranks
agree on it at the start of each forward: a bucket is kept in full if every rank planned that and none has
found its memory short since.  Graphs have the all-gather in any case; it is skipped if the whole bucket was
loaded.  The whole bucket contains this rank's node shard, so falling back moves nothing between ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
from torch import Tensor

from fcdp_compile.errors import StaleParameterError
from fcdp_compile.params.spec import Home
from fcdp_compile.plan import LANES, Bucket, Kind, Placement, Tier
from fcdp_compile.runtime.cache.codecs import Codecs
from fcdp_compile.runtime.cache.device_memory import DeviceMemory
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.runtime.lanes.lanes import Lanes, range_name, tensor_of
from fcdp_compile.runtime.lanes.pending import Pending
from fcdp_compile.strategy import Cache, Life
from fcdp_compile.strategy.formats import Format


class _Where(Enum):
    """Where a bucket is kept.

    PLANNED: in its tier.  FALLEN: on the host for good, because the device had no room for it.
    WHOLE: in full on the device, as all ranks agreed.  LEAVING: like WHOLE, until all ranks agree to give it
    up, because this rank's device has no more room.
    """

    PLANNED = "planned"
    FALLEN = "fallen"
    WHOLE = "whole"
    LEAVING = "leaving"


_SHORT = {_Where.PLANNED: _Where.FALLEN, _Where.WHOLE: _Where.LEAVING}
_AGREED = {_Where.PLANNED: _Where.WHOLE, _Where.FALLEN: _Where.LEAVING}
_REFUSED = {_Where.WHOLE: _Where.PLANNED, _Where.LEAVING: _Where.FALLEN}
"""How a place changes if this rank's device has no room, if all ranks agree to keep a bucket whole, and if
any rank refuses.  Other places stay."""


@dataclass(slots=True)
class _Copy:
    """The copy of one bucket that the cache keeps.

    kept: the node shard, or the whole bucket.  tier: which of the two is kept, and where.
    uses: how many backwards still need the copy, if its life ends with the backward.
    codec: decodes the copy in host memory, which holds one encoded row for each node; None if the copy is not
    encoded.
    """

    kept: Pending
    generation: int
    uses: int
    tier: Tier
    codec: Codec | None = None


@dataclass(slots=True)
class _State:
    """The cache's state of one bucket.  slab: host memory for its copies, also while it has none."""

    place: _Where = _Where.PLANNED
    copy: _Copy | None = None
    slab: Tensor | None = None

    @property
    def is_in_full(self) -> bool:
        """Whether all ranks have agreed to keep the whole bucket."""
        return self.place in (_Where.WHOLE, _Where.LEAVING)

    def becomes(self, change: Mapping[_Where, _Where]) -> None:
        self.place = change.get(self.place, self.place)


class NodeShardCache:
    """The cache of one model on this rank.

    placements: where the plan that runs wants each bucket, by number.
    """

    def __init__(
        self,
        counters: Counters,
        pool: PinnedPool,
        lanes: Lanes,
        placements: Mapping[int, Placement],
        codecs: Codecs | None = None,
    ) -> None:
        self._placements = placements
        self._counters = counters
        self._pool = pool
        self._lanes = lanes
        self._codecs = Codecs() if codecs is None else codecs
        self._states: defaultdict[int, _State] = defaultdict(_State)
        # Asked before a copy stays on the device, if its strategy leaves that choice.
        self.memory: DeviceMemory | None = None

    @property
    def fallen_back(self) -> int:
        """How many buckets are on the host, or are to go there, although they were planned for the device."""
        return sum(s.place in (_Where.FALLEN, _Where.LEAVING) for s in self._states.values())

    # --- full parameters: [Note: full parameters] ---------------------------------------------------------

    def wants_in_full(self, bucket: Bucket) -> bool:
        """Whether this rank would keep the whole bucket."""
        place, tier = self._states[bucket.id].place, self._placements[bucket.id].tier
        return tier is Tier.GPU_FULL and place in (_Where.PLANNED, _Where.WHOLE)

    def keeps_in_full(self, bucket: Bucket) -> bool:
        """Whether all ranks have agreed to keep the whole bucket."""
        return self._states[bucket.id].is_in_full

    def agree_in_full(self, bucket: Bucket, home: Home, *, agreed: bool) -> None:
        """Note what all ranks agreed on; a bucket that must no longer be kept in full falls back."""
        state = self._states[bucket.id]
        state.becomes(_AGREED if agreed else _REFUSED)
        if agreed or (copy := state.copy) is None or copy.tier is not Tier.GPU_FULL:
            return
        node_shard = self.node_shard(bucket.id, copy.generation, home)
        assert node_shard is not None, "the whole bucket has it"
        if (tier := self._tier_now(bucket, state)) is Tier.GPU:
            node_shard = node_shard.clone()  # a view would keep the whole bucket
        self._keep(bucket, tier, node_shard, copy.generation, copy.uses).wait()

    def keep_full(self, bucket: Bucket, generation: int, full: Pending) -> None:
        """Keep the whole bucket [G*S] in place of the node shard that it was gathered from, if agreed."""
        state = self._states[bucket.id]
        copy = state.copy
        if not state.is_in_full or copy is None or copy.generation != generation:
            return
        self._free_slab(state)
        kept = Pending(full.tensor, done=full.done)
        state.copy = _Copy(kept, generation, copy.uses, Tier.GPU_FULL)

    # --- copies -------------------------------------------------------------------------------------------

    def generation(self, bucket_id: int) -> int | None:
        """The generation of the bucket's copy, None without one."""
        copy = self._states[bucket_id].copy
        return None if copy is None else copy.generation

    def host_bytes(self) -> int:
        """Bytes of the node shards on the host; without the rounding to pages (`PinnedPool.slab_bytes`)."""
        copies = [s.copy for s in self._states.values() if s.copy is not None]
        return sum(copy.kept.tensor.nbytes for copy in copies if copy.tier is Tier.HOST)

    def _tier_now(self, bucket: Bucket, state: _State) -> Tier:
        """The tier for a node shard: the host if the device has no room, or had none before.

        The shard of a bucket that is kept in full goes to the device until all ranks agree to give it up.
        """
        on_device = self._placements[bucket.id].tier in (Tier.GPU, Tier.GPU_FULL)
        is_planned = on_device and state.place is _Where.PLANNED
        if not (is_planned or state.is_in_full):
            return Tier.HOST
        if self._is_short(bucket):
            state.becomes(_SHORT)
        return Tier.HOST if state.place is _Where.FALLEN else Tier.GPU

    def _is_short(self, bucket: Bucket) -> bool:
        may_choose = bucket.strategy.cache is Cache.ADAPTIVE
        return may_choose and self.memory is not None and self.memory.is_short()

    def make_room(self, bucket: Bucket) -> None:
        """Move the bucket's node shard to the host if device memory has become short since.

        A bucket that is kept in full stays until all ranks have agreed to give it up.
        """
        state = self._states[bucket.id]
        copy = state.copy
        if copy is None or copy.tier is Tier.HOST or not self._is_short(bucket):
            return
        state.becomes(_SHORT)
        if state.place is _Where.FALLEN:
            shard = Pending(copy.kept.tensor, done=copy.kept.done)
            self._keep(bucket, Tier.HOST, shard, copy.generation, copy.uses)

    def store(self, bucket: Bucket, node_shard: Tensor | Pending, generation: int) -> Pending:
        """Keep a node shard [N*S] of this generation, in the bucket's tier if there is room."""
        state = self._states[bucket.id]
        copy = state.copy
        uses = 1 + (copy.uses if copy is not None and copy.generation == generation else 0)
        return self._keep(bucket, self._tier_now(bucket, state), node_shard, generation, uses)

    def _keep(
        self, bucket: Bucket, tier: Tier, node_shard: Tensor | Pending, generation: int, uses: int
    ) -> Pending:
        """Replace the bucket's copy by the node shard, on the host or on the device."""
        state = self._states[bucket.id]
        if tier is Tier.GPU:
            done = node_shard.done if isinstance(node_shard, Pending) else None
            self._free_slab(state)
            kept = Pending(tensor_of(node_shard), done=done)
            state.copy = _Copy(kept, generation, uses, Tier.GPU)
            self._counters.add(Kind.STORE, 0)
            return Pending(kept.tensor, done=done)
        encoded = node_shard.encoded if isinstance(node_shard, Pending) else None
        is_encoded = bucket.host_format is not Format.FULL and encoded is not None
        source = encoded if encoded is not None and is_encoded else tensor_of(node_shard)
        slab = self._slab(state, source)
        self._counters.add(Kind.STORE, source.nbytes)
        stored = self._lanes.start(
            LANES[Kind.STORE],
            partial(slab.copy_, source, non_blocking=True),
            out=slab,
            reads=[node_shard],
            name=range_name(Kind.STORE, bucket),
        )
        codec = self._codecs.of_weights(bucket) if is_encoded else None
        kept = Pending(slab, done=stored.done)
        state.copy = _Copy(kept, generation, uses, Tier.HOST, codec)
        return stored

    def _slab(self, state: _State, like: Tensor) -> Tensor:
        """The bucket's slab if it has the right dtype and shape, or a new slab."""
        slab = state.slab
        if slab is None or (slab.dtype, slab.shape) != (like.dtype, like.shape):
            self._free_slab(state)
            slab = state.slab = self._pool.take(like.numel(), like.dtype)
        return slab

    def load(self, bucket: Bucket, generation: int) -> Pending:
        """The node shard [N*S] of this generation, or the whole bucket [G*S], on the device.

        Raises: StaleParameterError if the copy is gone or of another generation.
        """
        state = self._states[bucket.id]
        copy = state.copy
        if copy is None or copy.generation != generation:
            raise _gone(bucket)
        if bucket.strategy.life is Life.UNTIL_BACKWARD:
            copy.uses -= 1
            if not copy.uses:
                state.copy = None
        if copy.tier is Tier.HOST:
            return self._from_host(bucket, copy)
        self._counters.add(Kind.LOAD, 0)
        is_full = copy.tier is Tier.GPU_FULL
        return Pending(copy.kept.tensor, done=copy.kept.done, is_full=is_full)

    def _from_host(self, bucket: Bucket, copy: _Copy) -> Pending:
        kept, codec = copy.kept, copy.codec
        self._counters.add(Kind.LOAD, kept.tensor.nbytes)
        with torch.inference_mode(False):
            arrived = on_device = torch.empty_like(kept.tensor, device=self._lanes.device.torch)
            if codec is not None:
                elements = kept.tensor.nbytes // codec.bytes * codec.elements
                on_device = torch.empty(
                    elements, dtype=getattr(torch, bucket.dtype), device=arrived.device
                )

        def run() -> None:
            arrived.copy_(kept.tensor, non_blocking=True)
            if codec is not None:
                rows = codec.decode(arrived.view(-1, codec.bytes), on_device.dtype)
                on_device.view(rows.shape).copy_(rows)

        name = range_name(Kind.LOAD, bucket)
        reads: list[Tensor | Pending] = [kept, arrived]
        return self._lanes.start(LANES[Kind.LOAD], run, out=on_device, reads=reads, name=name)

    def node_shard(self, bucket_id: int, generation: int, home: Home) -> Tensor | None:
        """The exact node shard [N*S] of this generation where it is kept, ready to be read; None without it.

        home: this rank among those that share one copy of the bucket.
        """
        copy = self._states[bucket_id].copy
        if copy is None or copy.generation != generation or copy.codec is not None:
            return None
        if copy.kept.done is not None:
            copy.kept.done.order()
            if copy.tier is Tier.HOST:
                self._lanes.device.synchronize()  # the reader is the Python thread, not a stream
        kept = copy.kept.tensor
        return (
            kept.view(home.ranks_per_node, -1)[home.place] if copy.tier is Tier.GPU_FULL else kept
        )

    def drop(self, bucket_id: int) -> None:
        """Give the bucket's copy back, if it has one, and forget the bucket."""
        state = self._states.pop(bucket_id, None)
        if state is not None:
            self._free_slab(state)

    def _free_slab(self, state: _State) -> None:
        if state.slab is not None:
            self._pool.give_back(state.slab)
            state.slab = None


def _gone(bucket: Bucket) -> StaleParameterError:
    again = (
        f"; with strategy {bucket.strategy.name!r} a forward has only one backward, even with "
        "retain_graph=True"
        if bucket.strategy.life is Life.UNTIL_BACKWARD
        else ""
    )
    return StaleParameterError(
        f"bucket {bucket.id} ({bucket.params[0].name}, …) was gathered again or released since the forward "
        f"that this backward belongs to; run the backward before the next optimizer step{again}"
    )
