"""The two-level collectives: all-gather and averaging reduce-scatter, between nodes and within a node."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.mesh import Topology
from fcdp_compile.plan import Kind
from fcdp_compile.runtime.counters import AGREE, Counters
from fcdp_compile.runtime.pending import Pending

# torch 2.13 renamed these and warns of the older names, the only ones of 2.11.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_INTER = {Kind.INTER_ALL_GATHER, Kind.INTER_REDUCE_SCATTER}


class Collectives:
    """Collectives over one topology, counted as they are issued.

    Shapes: all-gather [n] -> [size*n]; reduce-scatter [size*n] -> [n], size being the group's.
    """

    def __init__(self, topology: Topology, counters: Counters) -> None:
        self._topology = topology
        self._counters = counters

    def _group(self, kind: Kind) -> tuple[dist.ProcessGroup | None, int]:
        t = self._topology
        return (t.inter, t.nodes) if kind in _INTER else (t.intra, t.ranks_per_node)

    def all_gather(self, kind: Kind, send: Tensor) -> Pending:
        """Start an all-gather of `send` (any dtype: bytes travel)."""
        group, size = self._group(kind)
        self._counters.add(kind, (size - 1) * send.nbytes)
        if size == 1 or not send.nbytes:
            return Pending(send.repeat(size) if size > 1 else send)
        send = send.contiguous()
        out = send.new_empty(size * send.numel())
        work = _all_gather(
            out.view(torch.uint8), send.view(torch.uint8), group=group, async_op=True
        )
        return Pending(out, work=work, held=send)

    def reduce_scatter(self, kind: Kind, send: Tensor) -> Pending:
        """Start a reduce-scatter that averages over the group; sums are taken in fp32 or wider."""
        group, size = self._group(kind)
        self._counters.add(kind, (size - 1) * (send.nbytes // size))
        if size == 1 or not send.nbytes:
            return Pending(send[: send.numel() // size])
        send = send.contiguous()
        if send.is_cuda and "nccl" in dist.get_backend(
            group
        ):  # "cpu:gloo,cuda:nccl" of make_mesh too
            shard = send.new_empty(send.numel() // size)
            work = _reduce_scatter(shard, send, op=dist.ReduceOp.AVG, group=group, async_op=True)
            return Pending(shard, work=work, held=send)
        # Gloo's reduce_scatter is an all-reduce underneath and moves twice the bytes; all-to-all moves the
        # right ones, and leaves the sum to us.
        parts = torch.empty_like(send)
        work = dist.all_to_all_single(parts, send, group=group, async_op=True)

        def average(received: Tensor) -> Tensor:
            wide = torch.promote_types(received.dtype, torch.float32)
            total = received.view(size, -1).sum(0, dtype=wide)
            return total.div_(size).to(received.dtype)

        return Pending(parts, work=work, held=send, finish=average)

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
