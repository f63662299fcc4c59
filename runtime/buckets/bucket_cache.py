"""The cache of a bucket: its node shard in pinned host memory or on the device, or the whole bucket there.

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

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial

import torch
from torch import Tensor

from fcdp_compile.core.params.spec import Home
from fcdp_compile.errors import StaleParameterError
from fcdp_compile.plan import Bucket, Kind, Tier
from fcdp_compile.runtime.buckets.transport import Transport
from fcdp_compile.runtime.collectives.difference import Code
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.runtime.lanes.lanes import range_name, tensor_of
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.strategy import Cache, Life
from fcdp_compile.strategy.formats import Format


class _Where(Enum):
    """Where a bucket is kept.

    PLANNED: in its tier.  FALLEN: on the host until it is dropped, because the device had no room for it.
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

    kept: the node shard, or the whole bucket.  tier: which of the two is kept, and where.  number: of the
    stored node shard, counted from 1: equal numbers are equal bits on the ranks that gathered it together.
    uses: how many backwards still need the copy, if its life ends with the backward.
    codec: decodes the copy in host memory, which holds one encoded row for each node; None if the copy is not
    encoded.
    """

    kept: Pending
    generation: int
    uses: int
    tier: Tier
    number: int
    codec: Codec | None = None


@dataclass(frozen=True, slots=True)
class Agreed:
    """How the ranks of a group have agreed to send differences.

    generation: of the values that the code has room for.  number: of the copy that they differ from.
    """

    code: Code
    generation: int
    number: int


class BucketCache:
    """The cache of one bucket on this rank; all plans of the model that have the bucket share it.

    Methods are given the tier in which the plan that runs wants the copy (`Placement.tier`).
    """

    def __init__(self, bucket: Bucket, transport: Transport) -> None:
        self._bucket = bucket
        self._transport = transport
        self.codecs = Codecs(bucket)
        self._place = _Where.PLANNED
        self._copy: _Copy | None = None
        self._slab: Tensor | None = None  # host memory for its copies, also while it has none
        self.stored = 0  # how many node shards were
        self.is_wrong: Tensor | None = None  # of the last one (`Pending`)
        self.agreed: Agreed | None = None  # how the next gather between nodes sends differences

    def _becomes(self, change: Mapping[_Where, _Where]) -> None:
        self._place = change.get(self._place, self._place)

    @property
    def has_fallen_back(self) -> bool:
        """Whether it is on the host, or is to go there, although it was planned for the device."""
        return self._place in (_Where.FALLEN, _Where.LEAVING)

    # --- full parameters: [Note: full parameters] ---------------------------------------------------------

    def wants_in_full(self, tier: Tier) -> bool:
        """Whether this rank would keep the whole bucket."""
        return tier is Tier.GPU_FULL and self._place in (_Where.PLANNED, _Where.WHOLE)

    @property
    def keeps_in_full(self) -> bool:
        """Whether all ranks have agreed to keep the whole bucket."""
        return self._place in (_Where.WHOLE, _Where.LEAVING)

    def agree_in_full(self, tier: Tier, home: Home, *, agreed: bool) -> None:
        """Note what all ranks agreed on; a bucket that must no longer be kept in full falls back."""
        self._becomes(_AGREED if agreed else _REFUSED)
        if agreed or (copy := self._copy) is None or copy.tier is not Tier.GPU_FULL:
            return
        node_shard = self.node_shard(copy.generation, home)
        assert node_shard is not None, "the whole bucket has it"
        if (now := self._tier_now(tier)) is Tier.GPU:
            node_shard = node_shard.clone()  # a view would keep the whole bucket
        self._keep(now, node_shard, copy.generation, copy.uses, copy.number).wait()

    def keep_full(self, full: Pending, generation: int) -> None:
        """Keep the whole bucket [G*S] in place of the node shard that it was gathered from, if agreed."""
        copy = self._copy
        if not self.keeps_in_full or copy is None or copy.generation != generation:
            return
        self._free_slab()
        kept = Pending(full.tensor, done=full.done)
        self._copy = _Copy(kept, generation, copy.uses, Tier.GPU_FULL, copy.number)

    # --- copies -------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int | None:
        """The generation of the copy, None without one."""
        return None if self._copy is None else self._copy.generation

    @property
    def host_bytes(self) -> int:
        """Bytes of the copy on the host; without the rounding to pages (`PinnedPool.slab_bytes`)."""
        copy = self._copy
        return copy.kept.tensor.nbytes if copy is not None and copy.tier is Tier.HOST else 0

    def _tier_now(self, tier: Tier) -> Tier:
        """The tier for a node shard: the host if the device has no room, or had none before.

        The shard of a bucket that is kept in full goes to the device until all ranks agree to give it up.
        """
        is_planned = tier in (Tier.GPU, Tier.GPU_FULL) and self._place is _Where.PLANNED
        if not (is_planned or self.keeps_in_full):
            return Tier.HOST
        if self._is_short():
            self._becomes(_SHORT)
        return Tier.HOST if self._place is _Where.FALLEN else Tier.GPU

    def _is_short(self) -> bool:
        memory = self._transport.device_memory
        may_choose = self._bucket.strategy.cache is Cache.ADAPTIVE
        return may_choose and memory is not None and memory.is_short()

    def make_room(self) -> None:
        """Move the node shard to the host if device memory has become short since.

        A bucket that is kept in full stays until all ranks have agreed to give it up.
        """
        copy = self._copy
        if copy is None or copy.tier is Tier.HOST or not self._is_short():
            return
        self._becomes(_SHORT)
        if self._place is _Where.FALLEN:
            shard = Pending(copy.kept.tensor, done=copy.kept.done)
            self._keep(Tier.HOST, shard, copy.generation, copy.uses, copy.number)

    def store(self, tier: Tier, node_shard: Tensor | Pending, generation: int) -> Pending:
        """Keep a node shard [N*S] of this generation, in the tier if there is room."""
        copy = self._copy
        uses = 1 + (copy.uses if copy is not None and copy.generation == generation else 0)
        self.stored += 1
        self.is_wrong = node_shard.is_wrong if isinstance(node_shard, Pending) else None
        return self._keep(self._tier_now(tier), node_shard, generation, uses, self.stored)

    def _keep(
        self, tier: Tier, node_shard: Tensor | Pending, generation: int, uses: int, number: int
    ) -> Pending:
        """Replace the copy by the node shard, on the host or on the device."""
        counters = self._transport.counters
        if tier is Tier.GPU:
            done = node_shard.done if isinstance(node_shard, Pending) else None
            self._free_slab()
            kept = Pending(tensor_of(node_shard), done=done)
            self._copy = _Copy(kept, generation, uses, Tier.GPU, number)
            counters.add(Kind.STORE, 0)
            return Pending(kept.tensor, done=done)
        encoded = node_shard.encoded if isinstance(node_shard, Pending) else None
        is_encoded = not self._bucket.host_format.is_exact and encoded is not None
        source = encoded if encoded is not None and is_encoded else tensor_of(node_shard)
        slab = self._slab_like(source)
        counters.add(Kind.STORE, source.nbytes)
        stored = self._transport.lanes.start(
            Kind.STORE.lane,
            partial(slab.copy_, source, non_blocking=True),
            out=slab,
            reads=[node_shard],
            name=range_name(Kind.STORE, self._bucket),
        )
        codec = self.codecs.of_weights if is_encoded else None
        kept = Pending(slab, done=stored.done)
        self._copy = _Copy(kept, generation, uses, Tier.HOST, number, codec)
        return stored

    def _slab_like(self, like: Tensor) -> Tensor:
        """The slab if it has the right dtype and shape, or a new slab."""
        slab = self._slab
        if slab is None or (slab.dtype, slab.shape) != (like.dtype, like.shape):
            self._free_slab()
            slab = self._slab = self._transport.pool.take(like.numel(), like.dtype)
        return slab

    def load(self, generation: int) -> Pending:
        """The node shard [N*S] of this generation, or the whole bucket [G*S], on the device.

        Raises: StaleParameterError if the copy is gone or of another generation.
        """
        copy = self._copy
        if copy is None or copy.generation != generation:
            raise _gone(self._bucket)
        if self._bucket.strategy.life is Life.UNTIL_BACKWARD:
            copy.uses -= 1
            if not copy.uses:
                self._copy = None
        if copy.tier is Tier.HOST:
            return self._from_host(copy, copy.kept.tensor)
        self._transport.counters.add(Kind.LOAD, 0)
        is_full = copy.tier is Tier.GPU_FULL
        return Pending(copy.kept.tensor, done=copy.kept.done, is_full=is_full)

    def _from_host(self, copy: _Copy, source: Tensor) -> Pending:
        """Start to load a copy, or a part of it."""
        kept, codec, lanes = copy.kept, copy.codec, self._transport.lanes
        self._transport.counters.add(Kind.LOAD, source.nbytes)
        with torch.inference_mode(False):
            arrived = on_device = torch.empty_like(source, device=lanes.device.torch)
            if codec is not None:
                elements = source.nbytes // codec.bytes * codec.elements
                dtype = getattr(torch, self._bucket.dtype)
                on_device = torch.empty(elements, dtype=dtype, device=arrived.device)

        def run() -> None:
            arrived.copy_(source, non_blocking=True)
            if codec is not None:
                rows = codec.decode(arrived.view(-1, codec.bytes), on_device.dtype)
                on_device.view(rows.shape).copy_(rows)

        name = range_name(Kind.LOAD, self._bucket)
        reads: list[Tensor | Pending] = [kept, arrived]
        return lanes.start(Kind.LOAD.lane, run, out=on_device, reads=reads, name=name)

    def node_shard(self, generation: int, home: Home) -> Tensor | None:
        """The exact node shard [N*S] of this generation where it is kept, ready to be read; None without it.

        home: this rank among those that share one copy of the bucket.
        """
        copy = self._copy
        if copy is None or copy.generation != generation or copy.codec is not None:
            return None
        if copy.kept.done is not None:
            copy.kept.done.order()
            if copy.tier is Tier.HOST:
                self._transport.lanes.device.synchronize()  # the reader is the Python thread, not a stream
        kept = copy.kept.tensor
        return _node_shard(kept, home) if copy.tier is Tier.GPU_FULL else kept

    # --- differences: `references` ------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """The number of the stored node shard that the copy is; 0 if no difference may be taken from it."""
        return 0 if self._copy is None else self._copy.number

    def unnumber(self) -> None:
        """Let no difference be taken from the copy."""
        if self._copy is not None:
            self._copy.number = 0

    def own_slot(self, home: Home) -> Pending:
        """This rank's slot [S] of the copy, which exists, on the device; outdated or not."""
        assert self._copy is not None, "asked of a bucket with a copy"
        return self._present(self._copy, home, home.node)

    def reference(self, home: Home) -> tuple[Code, Pending] | None:
        """The code for the gather that is about to start, and the copy [N*S] on the device.

        None: values are sent.  Only one gather gets the code.
        """
        agreed, self.agreed = self.agreed, None
        copy = self._copy
        if agreed is None or copy is None or copy.number != agreed.number:
            return None
        return agreed.code, self._present(copy, home)

    def _present(self, copy: _Copy, home: Home, node: int | None = None) -> Pending:
        """The node shard of a copy on the device, or the slot of one node."""
        shard = (
            _node_shard(copy.kept.tensor, home) if copy.tier is Tier.GPU_FULL else copy.kept.tensor
        )
        if node is not None:
            slots = self._bucket.sizes() or [self._bucket.slot_elements] * home.nodes
            shard = shard.split(slots)[node]
        if copy.tier is Tier.HOST:
            return self._from_host(copy, shard)
        return Pending(shard, done=copy.kept.done)

    def drop(self) -> None:
        """Give the copy back, if there is one; the next copy is where it is planned."""
        self._place, self._copy = _Where.PLANNED, None
        self._free_slab()

    def _free_slab(self) -> None:
        if self._slab is not None:
            self._transport.pool.give_back(self._slab)
            self._slab = None


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


def _node_shard(full: Tensor, home: Home) -> Tensor:
    """The node shard [N*S] in the whole bucket [G*S]."""
    return full.view(home.ranks_per_node, -1)[home.place]


class Codecs:
    """The codecs of one bucket's weights, and of the gradients of some or all of its parameters."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._of_gradients: dict[tuple[str, ...], Codec | None] = {}

    @cached_property
    def of_weights(self) -> Codec | None:
        """The codec of the weights between nodes; None if they are sent unchanged."""
        return self._made(self._bucket.wire, [p.name for p in self._bucket.params])

    def of_gradients(self, params: tuple[str, ...]) -> Codec | None:
        """The codec of these parameters' gradients between nodes; None if they are sent unchanged."""
        if params not in self._of_gradients:
            self._of_gradients[params] = self._made(self._bucket.reduce_wire, params)
        return self._of_gradients[params]

    def _made(self, wire: Format, params: Collection[str]) -> Codec | None:
        slots = [p.layout.slot_elements for p in self._bucket.params if p.name in params]
        return None if wire.is_exact else Codec(wire, slots)
