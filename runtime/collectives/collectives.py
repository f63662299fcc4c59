"""The two-level collectives: all-gather and averaging reduce-scatter, between nodes and within a node.

Ranks agree by words (`Telling`): one rank gathers them and broadcasts the result.  Gloo broadcasts along a
tree, so all ranks know after 1 + log2(G) hops (`cost.agreement_hops`); its all-gather is a ring of G - 1
hops.  The gather runs beside the Python thread from `tell` to `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.core.ranks.lost_ranks import Wait, finish
from fcdp_compile.core.ranks.messages import broadcast_first, gather_at_once, gather_objects
from fcdp_compile.devices import Device
from fcdp_compile.plan import Kind
from fcdp_compile.plan.kinds import INTER_KINDS
from fcdp_compile.plan.reduction import all_reduce_bytes
from fcdp_compile.runtime.collectives.bodies import (
    all_reduce,
    gather_differences,
    gather_encoded,
    gather_own,
    gather_parts,
    gather_rest,
    reduce_encoded,
    reduce_parts,
    reduce_scatter,
)
from fcdp_compile.runtime.collectives.channel import Channel
from fcdp_compile.runtime.collectives.counters import AGREE, EXCHANGE, Counters
from fcdp_compile.runtime.collectives.difference import Code
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.runtime.lanes.lanes import Lanes, tensor_of
from fcdp_compile.runtime.lanes.tasks import Pending, passed_on

Combine = Callable[[Tensor, Tensor], Tensor]
"""Makes one tensor of the words of two ranks; in any order, the same of all ranks."""


class Collectives:
    """Collectives over one topology, counted as they are issued, run on the inter and intra lanes.

    Every collective on the two groups goes through the lanes, even if its caller waits for it at once: if two
    threads used one group, ranks could start collectives in different orders.

    during: describes a collective, given the name of its profiler's range, and the pass that it is a part of;
    for the error if a rank does not join.

    Shapes: all-gather [n] -> [size*n]; reduce-scatter [size*n] -> [n], where size is the group's.  With
    `sizes`, the ranks of the group have different numbers of elements.
    """

    def __init__(self, topology: Topology, counters: Counters, lanes: Lanes) -> None:
        self._topology = topology
        self.counters = counters
        self._lanes = lanes
        self.during: Callable[[str], str] = told_alone

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self._topology.node

    @property
    def place(self) -> int:
        """The place of this rank in its node."""
        return self._topology.place

    @property
    def device(self) -> torch.device:
        """The device that collectives are for."""
        return self._lanes.device.torch

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks of a node."""
        return self._topology.ranks_per_node

    def _start(
        self,
        kind: Kind,
        body: Callable[[Channel], object],
        out: Tensor,
        reads: Sequence[Tensor | Pending],
        name: str,
    ) -> Pending:
        """Start a collective (`bodies`), which reads `reads` and fills `out`, on the lane of its kind."""
        t = self._topology
        group = t.inter if kind in INTER_KINDS else t.intra
        wait = Wait(partial(self.during, name), self._lanes.exiting)
        scratch = self._lanes.scratch()
        channel = Channel(group, self.group_size(kind), self._lanes.device, wait, scratch)
        run = partial(body, channel)
        return self._lanes.start(kind.lane, run, out=out, reads=reads, name=name, scratch=scratch)

    def group_size(self, kind: Kind) -> int:
        """How many ranks take part in a collective of this kind."""
        t = self._topology
        return t.nodes if kind in INTER_KINDS else t.ranks_per_node

    def all_gather(
        self,
        kind: Kind,
        send: Tensor | Pending,
        name: str,
        *,
        codec: Codec | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Pending:
        """Start an all-gather of `send` (any dtype: bytes are sent); `name` is for the profiler's range.

        codec: encodes what is sent; a rank decodes its own part, too, so that all ranks get the same values.
        sizes: the elements of each rank, if they differ; then without a codec.
        """
        size = self.group_size(kind)
        send = _contiguous(send)
        own = tensor_of(send)
        sent_bytes = own.nbytes if codec is None else codec.bytes
        self.counters.add(kind, (size - 1) * sent_bytes)
        if size == 1:
            return passed_on(send)
        out = _empty(own, size * own.numel() if sizes is None else sum(sizes))
        if not out.nbytes:
            return Pending(out)
        if sizes is not None:
            return self._start(kind, partial(gather_parts, out, own, sizes), out, [send], name)
        if codec is None:
            return self._start(kind, lambda over: over.all_gather(out, own), out, [send], name)
        encoded = _empty(own, size * sent_bytes, torch.uint8)
        body = partial(gather_encoded, out, encoded, own, codec)
        pending = self._start(kind, body, out, [send, encoded], name)
        pending.encoded = encoded
        return pending

    def difference_all_gather(
        self,
        kind: Kind,
        send: Tensor | Pending,
        before: Pending,
        code: Code,
        name: str,
        *,
        sizes: Sequence[int] | None = None,
    ) -> Pending:
        """Start an all-gather between nodes of differences: the same result as `all_gather`.

        before: an earlier result, with equal bits on all ranks.  code: the same on all ranks, with room for
        the differences of each.  The result's `is_wrong` tells if that was not so.  sizes: of `all_gather`.
        """
        size = self.group_size(kind)
        send = _contiguous(send)
        own = tensor_of(send)
        self.counters.add(kind, (size - 1) * code.bytes)
        sizes = sizes or [own.numel()] * size
        out = _empty(own, sum(sizes))
        encoded = _empty(own, size * code.bytes, torch.uint8)
        wrong = _empty(own, 1, torch.bool)
        body = partial(
            gather_differences, out, encoded, wrong, own, before.tensor, sizes, code, self.node
        )
        pending = self._start(kind, body, out, [send, encoded, wrong, before], name)
        pending.is_wrong = wrong
        return pending

    def own_all_gather(
        self, kind: Kind, send: Tensor | Pending, name: str, *, codec: Codec | None = None
    ) -> Pending:
        """Start the intra-node all-gather of the node's own home shards (HO-Ring): [S] -> [g*S].

        It runs while the shards are sent between nodes.  codec: the codec of the transfer between nodes; the
        result has the values that other nodes decode.
        """
        size = self.group_size(kind)
        send = _contiguous(send)
        own = tensor_of(send)
        self.counters.add(kind, (size - 1) * own.nbytes)
        out = _empty(own, size * own.numel())
        if not own.nbytes:
            return Pending(out)
        return self._start(kind, partial(gather_own, out, own, codec), out, [send], name)

    def rest_all_gather(
        self, kind: Kind, send: Tensor | Pending, own: Tensor | Pending, name: str
    ) -> Pending:
        """Start the intra-node all-gather of other nodes' shards (HO-Ring): [N*S] and [g*S] -> [g*N*S]."""
        size = self.group_size(kind)
        node_shard, mine = tensor_of(send), tensor_of(own)
        self.counters.add(kind, (size - 1) * (node_shard.nbytes - mine.nbytes // size))
        out = _empty(node_shard, size * node_shard.numel())
        if not node_shard.nbytes:
            return Pending(out)
        body = partial(gather_rest, out, node_shard, mine, self.node)
        return self._start(kind, body, out, [send, own], name)

    def reduce_scatter(
        self,
        kind: Kind,
        send: Tensor | Pending,
        name: str,
        *,
        dtype: torch.dtype,
        codec: Codec | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Pending:
        """Start a reduce-scatter that averages over the group; sums are taken in fp32 or wider.

        dtype: of the result.
        codec: encodes what is sent, once; decoded values are summed (qgZ of ZeRO++, section 3.3).
        sizes: the elements of each node's rank, if they differ; then between nodes and without a codec.
        """
        size = self.group_size(kind)
        send = _contiguous(send)
        whole = tensor_of(send)
        mine = whole.numel() // size if sizes is None else sizes[self.node]
        sent_bytes = (size - 1) * (whole.nbytes // size if codec is None else codec.bytes)
        if sizes is not None:
            sent_bytes = whole.nbytes - mine * whole.itemsize
        self.counters.add(kind, sent_bytes)
        if size == 1:
            return passed_on(send)
        out = _empty(whole, mine, dtype)
        if not whole.nbytes:
            return Pending(out)
        if sizes is not None:
            body = partial(reduce_parts, out, whole, sizes)
        elif codec is None:
            body = partial(reduce_scatter, out, whole)
        else:
            body = partial(reduce_encoded, out, whole, codec)
        return self._start(kind, body, out, [send], name)

    def all_reduce(self, kind: Kind, send: Tensor | Pending, name: str) -> Pending:
        """Start an averaging all-reduce: a reduce-scatter, and an all-gather of its result.

        Shape: [n] -> [n].  Every rank gets the same bits.
        """
        size = self.group_size(kind)
        send = _contiguous(send)
        own = tensor_of(send)
        self.counters.add(kind, all_reduce_bytes(own.numel(), own.itemsize, size))
        if size == 1 or not own.nbytes:
            return passed_on(send)
        parts = _empty(own, -(-own.numel() // size) * size)
        out = parts.narrow(0, 0, own.numel())
        return self._start(kind, partial(all_reduce, parts, own), out, [send], name)

    def exchange(
        self, send: Tensor, *, received: Sequence[int], sent: Sequence[int], name: str
    ) -> Pending:
        """Start an all-to-all within the node: [sum of `sent`] -> [sum of `received`].

        received, sent: how many elements this rank gets from and gives to the rank at each place.
        """
        self.counters.add(EXCHANGE, (send.numel() - sent[self.place]) * send.itemsize)
        out = _empty(send, sum(received))
        body = partial(Channel.all_to_all, out=out, send=send, sizes=(received, sent))
        return self._start(Kind.INTRA_ALL_GATHER, body, out, [send], name)

    def reduction(
        self,
        kind: Kind,
        send: Tensor | Pending,
        name: str,
        *,
        dtype: torch.dtype,
        codec: Codec | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Pending:
        """Start one step of a reduction of gradients (`fcdp_compile.plan.reduction`).

        dtype: of the result of a reduce-scatter.  codec: encodes the gradients of a reduce-scatter.
         sizes: of a reduce-scatter between nodes.
        """
        if kind is Kind.INTER_ALL_REDUCE:
            return self.all_reduce(kind, send, name)
        if kind is Kind.INTRA_GRAD_ALL_GATHER:
            return self.all_gather(kind, send, name)
        assert kind in (Kind.INTRA_REDUCE_SCATTER, Kind.INTER_REDUCE_SCATTER), kind
        return self.reduce_scatter(kind, send, name, dtype=dtype, codec=codec, sizes=sizes)

    def agree(
        self,
        words: list[int],
        what: str = "an agreement of all ranks",
        group: dist.ProcessGroup | None = None,
    ) -> list[list[int]]:
        """Every rank's `words`, the same number on every rank; all ranks of the group must call it.

        what: names the agreement, for the error if a rank does not join.  group: by default all ranks that
        have the same parts of parameters (`Topology.control`).

        Raises: LostRankError.
        """
        if (group := group or self._topology.control) is None:
            return [words]
        ranks = dist.get_world_size(group)
        # Not on the default device: a user may be building another model on meta.
        mine = torch.tensor(words, dtype=torch.int64, device="cpu")
        self.counters.add(AGREE, (ranks - 1) * mine.nbytes)
        everyone = torch.empty(ranks * len(words), dtype=torch.int64, device="cpu")
        gather_at_once(everyone, mine, group, self.during(what))
        rows: list[list[int]] = everyone.view(ranks, -1).tolist()
        return rows

    def tell(self, words: list[int], what: str, of_all: Combine = torch.bitwise_or) -> Telling:
        """Start to tell all ranks `words`, equally many on every rank.

        All ranks of the mesh must call it.  what: names the agreement, for the error if a rank does not join.
        of_all: makes the result of two ranks' words, such as their bitwise or.
        """
        t = self._topology
        if t.ranks > 1:
            self.counters.add(AGREE, len(words) * torch.int64.itemsize)
        return Telling(words, t.control, partial(self.during, what), of_all)

    def exchange_texts(self, text: str, group: dist.ProcessGroup | None = None) -> list[str]:
        """Every rank's `text`, by rank in the group; for reports of disagreement.  group: as for `agree`."""
        if (group := group or self._topology.control) is None:
            return [text]
        return gather_objects(
            text, group, self.during("a comparison of what ranks are about to do")
        )


def told_alone(name: str) -> str:
    """Describe a collective that is not part of a pass."""
    return name.removeprefix("fcdp::")


def are_blocking(topology: Topology, device: Device) -> bool:
    """Whether collectives on this topology block their caller: Gloo's do, also for tensors on a GPU."""
    groups = [g for g in (topology.inter, topology.intra) if g is not None]
    return any(not device.runs_on_stream(g) for g in groups)


def _contiguous(send: Tensor | Pending) -> Tensor | Pending:
    """The value, contiguous: a lane's result already is; compute's result, even if `Pending`, may not be."""
    if isinstance(send, Pending) and send.done is not None:
        return send
    tensor = tensor_of(send)
    return send if tensor.is_contiguous() else tensor.contiguous()


def _empty(like: Tensor, elements: int, dtype: torch.dtype | None = None) -> Tensor:
    # A lane's thread is outside of the caller's inference mode, and cannot write to tensors made in it.
    with torch.inference_mode(False):
        return torch.empty(elements, dtype=dtype or like.dtype, device=like.device)


class Telling:
    """Words on their way to all ranks.

    All ranks of the group must make it, with equally many words, and call `finish` in the same place among
    the group's collectives.  doing: says what the words are for, for the error if a rank does not join.
    of_all: makes the result of two ranks' words.
    """

    def __init__(
        self,
        words: Sequence[int],
        group: dist.ProcessGroup | None,
        doing: Callable[[], str],
        of_all: Combine = torch.bitwise_or,
    ) -> None:
        # Not on the default device: a user may be building another model on meta.
        self._words = torch.tensor(words, dtype=torch.int64, device="cpu")
        self._group = group
        self._doing = doing
        self._of_all = of_all
        self._everyone: list[torch.Tensor] | None = None
        self._gathering: dist.Work | None = None
        if group is None:  # a single rank
            return
        if dist.get_rank(group) == 0:
            self._everyone = [torch.empty_like(self._words) for _ in range(group.size())]
        self._gathering = dist.gather(
            self._words, self._everyone, group=group, group_dst=0, async_op=True
        )

    def finish(self) -> list[int]:
        """The result of all ranks' words.

        Raises: LostRankError.
        """
        if self._group is not None and self._gathering is not None:
            finish(self._gathering, self._group, Wait(self._doing))
            if self._everyone is not None:
                self._words = reduce(self._of_all, self._everyone)
            broadcast_first(self._words, self._group, self._doing)
        found: list[int] = self._words.tolist()
        return found
