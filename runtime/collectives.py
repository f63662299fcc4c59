"""The two-level collectives: all-gather and averaging reduce-scatter, between nodes and within a node."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from threading import Event

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.mesh import Topology, has_nccl
from fcdp_compile.packing import padded
from fcdp_compile.plan import LANES, Kind
from fcdp_compile.quantize import Codec
from fcdp_compile.reduction import INTER_KINDS, all_reduce_bytes
from fcdp_compile.runtime.counters import AGREE, Counters
from fcdp_compile.runtime.lanes import Lanes, tensor_of
from fcdp_compile.runtime.pending import Pending
from fcdp_compile.runtime.tasks import Begun

# torch 2.13 renamed these and warns of the older names, the only ones of 2.11.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_LOOK = timedelta(seconds=0.25)
"""How often a blocked collective looks whether the interpreter ends."""


class Collectives:
    """Collectives over one topology, counted as they are issued, run on the inter and intra lanes.

    Every collective on the two groups goes through the lanes, also those that are waited for at once: two
    threads that use one group would mix up the order that ranks meet in.

    Shapes: all-gather [n] -> [size*n]; reduce-scatter [size*n] -> [n], size being the group's.
    """

    def __init__(self, topology: Topology, counters: Counters, lanes: Lanes) -> None:
        self._topology = topology
        self._counters = counters
        self._lanes = lanes

    def _group(self, kind: Kind) -> tuple[dist.ProcessGroup | None, int]:
        t = self._topology
        return (t.inter, t.nodes) if kind in INTER_KINDS else (t.intra, t.ranks_per_node)

    def group_size(self, kind: Kind) -> int:
        """How many ranks take part in a collective of that kind."""
        return self._group(kind)[1]

    def all_gather(
        self, kind: Kind, send: Tensor | Pending, name: str, *, codec: Codec | None = None
    ) -> Pending:
        """Start an all-gather of `send` (any dtype: bytes travel); `name` is of the profiler's range.

        codec: of what crosses; every rank gets its own part, too, as the others do.
        """
        group, size = self._group(kind)
        send = _contiguous(send)
        own = tensor_of(send)
        sent_bytes = own.nbytes if codec is None else codec.bytes
        self._counters.add(kind, (size - 1) * sent_bytes)
        if size == 1:
            return send if isinstance(send, Pending) else Pending(send)
        out = _empty(own, size * own.numel())
        if not own.nbytes:
            return Pending(out)
        if codec is None:
            run = partial(_gather, out, own, group, self._lanes.exiting)
            return self._lanes.start(LANES[kind], run, out=out, reads=[send], name=name)
        encoded = _empty(own, size * sent_bytes, torch.uint8)
        run = partial(_gather_encoded, out, encoded, own, codec, group, self._lanes.exiting)
        pending = self._lanes.start(LANES[kind], run, out=out, reads=[send, encoded], name=name)
        pending.encoded = encoded
        return pending

    def reduce_scatter(
        self, kind: Kind, send: Tensor | Pending, name: str, *, codec: Codec | None = None
    ) -> Pending:
        """Start a reduce-scatter that averages over the group; sums are taken in fp32 or wider.

        codec: of what crosses: encoded once, and summed once decoded (qgZ of ZeRO++, section 3.3).
        """
        group, size = self._group(kind)
        send = _contiguous(send)
        whole = tensor_of(send)
        sent_bytes = whole.nbytes // size if codec is None else codec.bytes
        self._counters.add(kind, (size - 1) * sent_bytes)
        if size == 1:
            return send if isinstance(send, Pending) else Pending(send)
        out = _empty(whole, whole.numel() // size)
        if not whole.nbytes:
            return Pending(out)
        if codec is None:
            run = partial(_reduce, out, whole, group, size, self._lanes.exiting)
        else:
            run = partial(_reduce_encoded, out, whole, codec, group, size, self._lanes.exiting)
        return self._lanes.start(LANES[kind], run, out=out, reads=[send], name=name)

    def all_reduce(self, kind: Kind, send: Tensor | Pending, name: str) -> Pending:
        """Start an averaging all-reduce: a reduce-scatter, and an all-gather of what that leaves.

        Shape: [n] -> [n].  Every rank gets the same bits.
        """
        group, size = self._group(kind)
        send = _contiguous(send)
        own = tensor_of(send)
        self._counters.add(kind, all_reduce_bytes(own.numel(), own.itemsize, size))
        if size == 1 or not own.nbytes:
            return Pending(own, done=send.done if isinstance(send, Pending) else None)
        parts = _empty(own, -(-own.numel() // size) * size)
        out = parts.narrow(0, 0, own.numel())
        run = partial(_all_reduce, parts, own, group, size, self._lanes.exiting)
        return self._lanes.start(LANES[kind], run, out=out, reads=[send, parts], name=name)

    def reduction(
        self, kind: Kind, send: Tensor | Pending, name: str, *, codec: Codec | None = None
    ) -> Pending:
        """Start one step of a reduction of gradients (`fcdp_compile.reduction`).

        codec: of what crosses in a reduce-scatter.
        """
        if kind is Kind.INTER_ALL_REDUCE:
            return self.all_reduce(kind, send, name)
        if kind is Kind.INTRA_GRAD_ALL_GATHER:
            return self.all_gather(kind, send, name)
        return self.reduce_scatter(kind, send, name, codec=codec)

    def agree(self, words: list[int]) -> list[list[int]]:
        """Every rank's `words`, the same number on every rank; all ranks of the mesh must call it."""
        t = self._topology
        if t.ranks == 1:
            return [words]
        mine = torch.tensor(words, dtype=torch.int64)
        self._counters.add(AGREE, (t.ranks - 1) * mine.nbytes)
        everyone = torch.empty(t.ranks * len(words), dtype=torch.int64)
        _all_gather(everyone, mine, group=t.control)
        rows: list[list[int]] = everyone.view(t.ranks, -1).tolist()
        return rows

    def exchange_texts(self, text: str) -> list[str]:
        """Every rank's `text`, in the order of the mesh's ranks; for reports of disagreement."""
        t = self._topology
        if t.ranks == 1:
            return [text]
        texts: list[str] = [""] * t.ranks
        dist.all_gather_object(texts, text, group=t.control)
        return texts


def are_blocking(topology: Topology) -> bool:
    """Whether collectives on this topology block their caller: Gloo's do, also for CUDA tensors."""
    groups = [g for g in (topology.inter, topology.intra) if g is not None]
    return any(not has_nccl(g) for g in groups)


def _contiguous(send: Tensor | Pending) -> Tensor | Pending:
    """What a lane leaves is contiguous; what compute made, also if it comes as a `Pending`, need not be."""
    if isinstance(send, Pending) and send.done is not None:
        return send
    tensor = tensor_of(send)
    return send if tensor.is_contiguous() else tensor.contiguous()


def _empty(like: Tensor, elements: int, dtype: torch.dtype | None = None) -> Tensor:
    # A lane's thread is outside of the caller's inference mode, where such tensors can't be written.
    with torch.inference_mode(False):
        return like.new_empty(elements, dtype=dtype)


def _gather(
    out: Tensor, send: Tensor, group: dist.ProcessGroup | None, exiting: Event
) -> Begun | None:
    if send.is_cuda and has_nccl(group):
        _start_gather(out, send, group).wait()  # makes the current stream wait
        return None
    staged = _on_host(send) if send.is_cuda else send
    arrived = _pinned(staged, out.numel()) if send.is_cuda else out
    work = _start_gather(arrived, staged, group)

    def finish() -> None:
        _finish(work, exiting)
        if arrived is not out:
            _to_device(out, arrived)

    return Begun(finish)


def _gather_encoded(
    out: Tensor,
    encoded: Tensor,
    send: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | None,
    exiting: Event,
) -> Begun | None:
    left = _gather(encoded, codec.encode(send.view(1, -1)).view(-1), group, exiting)

    def finish() -> None:
        if left is not None:
            left.finish()
        rows = codec.decode(encoded.view(-1, codec.bytes), out.dtype)
        out.view(rows.shape).copy_(rows)

    return _now_or_later(finish, is_now=left is None)


def _now_or_later(finish: Callable[[], None], *, is_now: bool) -> Begun | None:
    if not is_now:
        return Begun(finish)
    finish()
    return None


def _start_gather(out: Tensor, send: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    # Bytes travel, whatever the dtype.  Views taken here, as the caller's inference mode would spoil them.
    work: dist.Work = _all_gather(
        out.view(torch.uint8), send.view(torch.uint8), group=group, async_op=True
    )
    return work


def _reduce(
    out: Tensor, send: Tensor, group: dist.ProcessGroup | None, size: int, exiting: Event
) -> Begun | None:
    if send.is_cuda and has_nccl(group):
        _reduce_scatter(out, send, op=dist.ReduceOp.AVG, group=group, async_op=True).wait()
        return None
    # Gloo's reduce_scatter is an all-reduce underneath and moves twice the bytes; all-to-all moves the
    # right ones, and leaves the sum to us.
    staged = _on_host(send) if send.is_cuda else send
    parts = torch.empty_like(staged)
    work = dist.all_to_all_single(parts, staged, group=group, async_op=True)

    def finish() -> None:
        _finish(work, exiting)
        wide = torch.promote_types(parts.dtype, torch.float32)
        average = parts.view(size, -1).sum(0, dtype=wide).div_(size)
        if out.is_cuda:
            _to_device(out, average.to(out.dtype).pin_memory())
        else:
            out.copy_(average)

    return Begun(finish)


def _all_reduce(
    out: Tensor, send: Tensor, group: dist.ProcessGroup | None, size: int, exiting: Event
) -> Begun | None:
    """The average of [n] in `out`, which is as long as n rounded up to a multiple of the group's size."""
    whole = padded(send, size)
    mine = torch.empty_like(out[: out.numel() // size])
    left = _reduce(mine, whole, group, size, exiting)
    if left is not None:
        left.finish()  # here: what another thread began would meet the next collective out of order
    return _gather(out, mine, group, exiting)


def _reduce_encoded(
    out: Tensor,
    send: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | None,
    size: int,
    exiting: Event,
) -> Begun | None:
    on_stream = send.is_cuda and has_nccl(group)
    encoded = codec.encode(send.view(size, -1))
    staged = _on_host(encoded.view(-1)) if send.is_cuda and not on_stream else encoded.view(-1)
    parts = torch.empty_like(staged)
    work = dist.all_to_all_single(parts, staged, group=group, async_op=True)

    def finish() -> None:
        if on_stream:
            work.wait()  # makes the current stream wait
        else:
            _finish(work, exiting)
        wide = torch.promote_types(out.dtype, torch.float32)
        rows = codec.decode(parts.view(size, -1).to(out.device), wide)
        out.copy_(rows.sum(0).div_(size))

    return _now_or_later(finish, is_now=on_stream)


def _finish(work: dist.Work, exiting: Event) -> None:
    """Wait for a collective that blocks; until the interpreter ends, for which see `thread_lane`."""
    while not work.is_completed():
        try:
            work.wait(_LOOK)
        except RuntimeError:
            # Either it took longer, or failed, or was done right after: only the work itself can tell.
            if exiting.is_set():
                raise
    work.wait()


def _on_host(tensor: Tensor) -> Tensor:
    host = _pinned(tensor, tensor.numel())
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream().synchronize()  # this thread's own stream, off the Python main thread
    return host


def _to_device(out: Tensor, host: Tensor) -> None:
    out.copy_(host, non_blocking=True)
    # The allocator of pinned memory notes which stream reads it, so `host` may go.


def _pinned(like: Tensor, elements: int) -> Tensor:
    return torch.empty(elements, dtype=like.dtype, pin_memory=True)
