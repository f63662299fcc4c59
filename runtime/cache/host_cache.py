"""What waits for its next use: node shards in pinned host memory or on the device, or whole buckets there.

A bucket has at most one entry, of one generation, in its plan's tier or, where the device's memory is short
when it is stored, on the host.  Host slabs have the exact size, are allocated once and written again and
again; only `drop` gives them back.

[Note: full parameters] Where there is room, the device keeps the whole bucket as gathered, and nothing needs
to be gathered again within the node either.  That is a collective that all ranks of a node leave out or none,
so they agree on it, at the start of each forward: a bucket is kept in full if every rank planned it so and
none found its memory short since.  Graphs have the all-gather in any case; it is passed over if what is
loaded is the whole bucket.  A rank's own part of that is its node shard, so falling back moves nothing
between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fcdp_compile.errors import StaleParameterError
from fcdp_compile.params.spec import Home
from fcdp_compile.plan import LANES, Bucket, Kind, Tier
from fcdp_compile.runtime.cache.codecs import Codecs
from fcdp_compile.runtime.cache.device_memory import DeviceMemory
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.runtime.lanes.lanes import Lanes, range_name, tensor_of
from fcdp_compile.runtime.lanes.pending import Pending
from fcdp_compile.strategy import Cache, Life
from fcdp_compile.strategy.formats import Format


@dataclass(slots=True)
class _Entry:
    """kept: the node shard, or the whole bucket.  tier: which of them, and where.

    uses: backwards that still want it, where the life ends with the backward.  codec: of what is kept, a row
    for each node; None where it is the values themselves.
    """

    kept: Pending
    generation: int
    uses: int
    tier: Tier
    codec: Codec | None = None


class NodeShardCache:
    """The cache of one model on this rank."""

    def __init__(
        self,
        counters: Counters,
        pool: PinnedPool,
        lanes: Lanes,
        codecs: Codecs | None = None,
    ) -> None:
        self._counters = counters
        self._pool = pool
        self._lanes = lanes
        self._codecs = Codecs() if codecs is None else codecs
        self._entries: dict[int, _Entry] = {}
        self._fallen_back: set[int] = set()
        self._in_full: set[int] = set()  # what all ranks agreed to keep so
        # Asked before an entry stays on the device whose strategy leaves it the choice.
        self.memory: DeviceMemory | None = None

    @property
    def fallen_back(self) -> int:
        """How many buckets are on the host although they were planned for the device."""
        return len(self._fallen_back)

    # --- full parameters: [Note: full parameters] ---------------------------------------------------------

    def wants_in_full(self, bucket: Bucket) -> bool:
        """Whether this rank would keep the whole bucket."""
        return bucket.tier is Tier.GPU_FULL and bucket.id not in self._fallen_back

    def keeps_in_full(self, bucket: Bucket) -> bool:
        """Whether all ranks have agreed to keep the whole bucket."""
        return bucket.id in self._in_full

    def agree_in_full(self, bucket: Bucket, home: Home, *, agreed: bool) -> None:
        """Take note of what all ranks came to; a bucket that is kept in full against it falls back."""
        if agreed:
            self._in_full.add(bucket.id)
            return
        self._in_full.discard(bucket.id)
        entry = self._entries.get(bucket.id)
        if entry is None or entry.tier is not Tier.GPU_FULL:
            return
        if (full := entry.kept).done is not None:
            full.done.order()
        node_shard = full.tensor.view(home.ranks_per_node, -1)[home.place]
        if self._tier_now(bucket) is Tier.GPU:
            node_shard = node_shard.clone()  # a view would keep all of it
        self.store(bucket, node_shard, entry.generation).wait()
        self._entries[bucket.id].uses = entry.uses

    def keep_full(self, bucket: Bucket, generation: int, full: Pending) -> None:
        """Keep the whole bucket [G*S] in place of the node shard that it was gathered from, if agreed."""
        entry = self._entries.get(bucket.id)
        if bucket.id not in self._in_full or entry is None or entry.generation != generation:
            return
        self._give_back(entry)
        kept = Pending(full.tensor, done=full.done, is_full=True)
        self._entries[bucket.id] = _Entry(kept, generation, entry.uses, Tier.GPU_FULL)

    # --- entries ------------------------------------------------------------------------------------------

    def generation(self, bucket_id: int) -> int | None:
        """The generation of the bucket's entry, None without one."""
        entry = self._entries.get(bucket_id)
        return None if entry is None else entry.generation

    def host_bytes(self) -> int:
        """Bytes of the node shards on the host; without the rounding to pages (`PinnedPool.slab_bytes`)."""
        return sum(e.kept.tensor.nbytes for e in self._entries.values() if e.tier is Tier.HOST)

    def _tier_now(self, bucket: Bucket) -> Tier:
        """Where a node shard goes: to the host if the device has no room; then for good, it will not later.

        One that is about to become the whole bucket goes there only when all ranks have agreed not to.
        """
        if bucket.id in self._in_full:
            if self._is_short(bucket):
                self._fallen_back.add(bucket.id)
            return Tier.GPU
        if bucket.tier not in (Tier.GPU, Tier.GPU_FULL) or bucket.id in self._fallen_back:
            return Tier.HOST
        if self._is_short(bucket):
            self._fallen_back.add(bucket.id)
            return Tier.HOST
        return Tier.GPU

    def _look_at_memory(self, bucket: Bucket, entry: _Entry) -> None:
        """Let what is on the device fall back if memory has become short since it was stored."""
        if self._entries.get(bucket.id) is not entry or not self._is_short(bucket):
            return
        self._fallen_back.add(bucket.id)
        if entry.tier is Tier.GPU and bucket.id not in self._in_full:
            self.store(bucket, Pending(entry.kept.tensor, done=entry.kept.done), entry.generation)
            self._entries[bucket.id].uses = entry.uses

    def _is_short(self, bucket: Bucket) -> bool:
        may_choose = bucket.strategy.cache is Cache.ADAPTIVE
        return may_choose and self.memory is not None and self.memory.is_short()

    def store(self, bucket: Bucket, node_shard: Tensor | Pending, generation: int) -> Pending:
        """Keep the node shard [N*S] of that generation: in the bucket's tier if there is room."""
        entry = self._entries.get(bucket.id)
        uses = 1 + (entry.uses if entry is not None and entry.generation == generation else 0)
        if self._tier_now(bucket) is Tier.GPU:
            done = node_shard.done if isinstance(node_shard, Pending) else None
            if entry is not None:
                self._give_back(entry)
            kept = Pending(tensor_of(node_shard), done=done)
            self._entries[bucket.id] = _Entry(kept, generation, uses, Tier.GPU)
            self._counters.add(Kind.STORE, 0)
            return Pending(kept.tensor, done=done)
        encoded = node_shard.encoded if isinstance(node_shard, Pending) else None
        is_encoded = bucket.host_format is not Format.FULL and encoded is not None
        source = encoded if encoded is not None and is_encoded else tensor_of(node_shard)
        slab = self._slab(entry, source)
        self._counters.add(Kind.STORE, source.nbytes)
        stored = self._lanes.start(
            LANES[Kind.STORE],
            partial(slab.copy_, source, non_blocking=True),
            out=slab,
            reads=[node_shard],
            name=range_name(Kind.STORE, bucket),
        )
        kept = Pending(slab, done=stored.done)
        codec = self._codecs.of_weights(bucket) if is_encoded else None
        self._entries[bucket.id] = _Entry(kept, generation, uses, Tier.HOST, codec)
        return stored

    def _slab(self, entry: _Entry | None, like: Tensor) -> Tensor:
        """The slab that the entry has, if it is of the right kind, or a new one."""
        if entry is not None and entry.tier is Tier.HOST:
            if (entry.kept.tensor.dtype, entry.kept.tensor.shape) == (like.dtype, like.shape):
                return entry.kept.tensor
            self._give_back(entry)
        return self._pool.take(like.numel(), like.dtype)

    def load(self, bucket: Bucket, generation: int) -> Pending:
        """The node shard [N*S] of that generation, or the whole bucket [G*S], on the device.

        Raises: StaleParameterError if the entry is gone or of another generation.
        """
        entry = self._entries.get(bucket.id)
        if entry is None or entry.generation != generation:
            again = (
                "; a strategy that caches until the backward has no second one with retain_graph=True"
                if bucket.strategy.life is Life.UNTIL_BACKWARD
                else ""
            )
            raise StaleParameterError(
                f"bucket {bucket.id} ({bucket.params[0].name}, …) was gathered again or released since the "
                "forward that this backward belongs to; run the backward before the next optimizer step"
                f"{again}"
            )
        if bucket.strategy.life is Life.UNTIL_BACKWARD:
            entry.uses -= 1
            if not entry.uses:
                self._entries.pop(bucket.id)
                self._give_back(entry)
        kept = entry.kept
        if entry.tier is not Tier.HOST:
            self._look_at_memory(bucket, entry)
            self._counters.add(Kind.LOAD, 0)
            return Pending(kept.tensor, done=kept.done, is_full=kept.is_full)
        self._counters.add(Kind.LOAD, kept.tensor.nbytes)
        with torch.inference_mode(False):
            arrived = on_device = torch.empty_like(kept.tensor, device=self._lanes.device.torch)
            if (codec := entry.codec) is not None:
                elements = kept.tensor.nbytes // codec.bytes * codec.elements
                on_device = arrived.new_empty(elements, dtype=getattr(torch, bucket.dtype))

        def run() -> None:
            arrived.copy_(kept.tensor, non_blocking=True)
            if codec is not None:
                rows = codec.decode(arrived.view(-1, codec.bytes), on_device.dtype)
                on_device.view(rows.shape).copy_(rows)

        name = range_name(Kind.LOAD, bucket)
        reads: list[Tensor | Pending] = [kept, arrived]
        return self._lanes.start(LANES[Kind.LOAD], run, out=on_device, reads=reads, name=name)

    def has_host_copy(self, bucket_id: int, generation: int) -> bool:
        """Whether the node shard of that generation is in host memory, or on its way there, exactly."""
        entry = self._entries.get(bucket_id)
        is_valid = entry is not None and entry.generation == generation
        return is_valid and entry is not None and entry.tier is Tier.HOST and entry.codec is None

    def host_copy(self, bucket_id: int, generation: int) -> Tensor | None:
        """The node shard [N*S] of that generation if it is in host memory: complete, for reading."""
        if not self.has_host_copy(bucket_id, generation):
            return None
        kept = self._entries[bucket_id].kept
        if kept.done is not None:
            kept.done.order()
            self._lanes.device.synchronize()  # the reader is the Python thread, not a stream
        return kept.tensor

    def drop(self, bucket_id: int) -> None:
        """Give the bucket's entry back, if it has one."""
        entry = self._entries.pop(bucket_id, None)
        if entry is not None:
            self._give_back(entry)
        self._fallen_back.discard(bucket_id)

    def _give_back(self, entry: _Entry) -> None:
        if entry.tier is Tier.HOST:
            self._pool.give_back(entry.kept.tensor)
