"""A process group of many ranks in one process: every other rank does what this one does.

    all-gather        every part of the output is a copy of this rank's
    reduce-scatter    this rank's part of the input, times the ranks for a sum
    all-reduce        the input, times the ranks for a sum

So nothing travels, and yet every output is written as a real group writes it, on the stream that is current:
memory traffic and the order of kernels are real, and the time of links is not.  Small agreements come out as
among ranks that agree.  NCCL takes no two ranks on one GPU, and torch's "fake" group leaves outputs as they
are.

Receiving from one rank is refused, because what it sends is not known here.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

BACKEND = "nccl_echo"
"""Its name: fcdp and FSDP2 are to treat CUDA tensors as they do with NCCL, on streams."""

_OF_EQUALS = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
"""What leaves a value as it is if all ranks have the same."""

_Options = Any  # torch's classes of options have no public names


class EchoWork(dist.Work):
    """A collective that has been issued: later work on the same stream comes after it."""

    def __init__(self) -> None:
        super().__init__()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> bool:
        return True


class EchoGroup(dist.ProcessGroup):
    """The group; methods have the names by which torch 2.11 to 2.15 call a process group."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place, self._ranks = rank, size
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        # torch keeps the name with a group's backends, and this group has none beneath it.
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return self._place

    def getBackendName(self) -> str:  # torch's name
        return BACKEND

    def all_gather_single(self, out: Tensor, send: Tensor, opts: _Options = None) -> EchoWork:
        rows = out.view(self._ranks, -1)
        if storage_of(out) != storage_of(send):
            rows.copy_(send.reshape(1, -1))
            return EchoWork()
        for row in rows:  # `send` is one of them
            if row.data_ptr() != send.data_ptr():
                row.copy_(send.view(-1))
        return EchoWork()

    def reduce_scatter_single(self, out: Tensor, send: Tensor, opts: _Options = None) -> EchoWork:
        out.view(-1).copy_(send.view(self._ranks, -1)[self._place])
        return self._reduce([out], opts)

    def all_to_all_single(
        self,
        out: Tensor,
        send: Tensor,
        out_sizes: list[int] | None = None,
        send_sizes: list[int] | None = None,
        opts: _Options = None,
    ) -> EchoWork:
        # No system that is measured sends parts of several sizes, and echoing these would give wrong sums.
        if out_sizes or send_sizes:
            raise NotImplementedError("an echo group exchanges parts of one size")
        out.view(self._ranks, -1).copy_(send.view(self._ranks, -1)[self._place])
        return EchoWork()

    def allgather(
        self, outs: list[list[Tensor]], sends: list[Tensor], opts: _Options = None
    ) -> EchoWork:
        for parts, send in zip(outs, sends, strict=True):
            for part in parts:
                part.copy_(send)
        return EchoWork()

    def gather(
        self, outs: list[list[Tensor]], sends: list[Tensor], opts: _Options = None
    ) -> EchoWork:
        return self.allgather(outs, sends)

    def allreduce(self, tensors: list[Tensor], opts: _Options = None) -> EchoWork:
        return self._reduce(tensors, opts)

    def all_gather_single_coalesced(
        self, outs: list[Tensor], sends: list[Tensor], opts: _Options = None
    ) -> EchoWork:
        for out, send in zip(outs, sends, strict=True):
            self.all_gather_single(out, send)
        return EchoWork()

    def reduce_scatter_single_coalesced(
        self, outs: list[Tensor], sends: list[Tensor], opts: _Options = None
    ) -> EchoWork:
        for out, send in zip(outs, sends, strict=True):
            self.reduce_scatter_single(out, send, opts)
        return EchoWork()

    def broadcast(self, tensors: list[Tensor], opts: _Options = None) -> EchoWork:
        return EchoWork()

    def barrier(self, opts: _Options = None) -> EchoWork:
        return EchoWork()

    # The names up to torch 2.12, which later versions keep for some callers.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce(self, tensors: list[Tensor], opts: _Options) -> EchoWork:
        op = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        if op == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self._ranks)
        elif not any(op == same for same in _OF_EQUALS):  # their own `==`, which `in` does not ask
            # What equal values give under such an operation is not known here, so it is refused.
            raise NotImplementedError(f"an echo group does not reduce with {op}")
        return EchoWork()


def storage_of(tensor: Tensor) -> int:
    """Where a tensor's memory begins."""
    return tensor.untyped_storage().data_ptr()


def init_echo(nodes: int, ranks_per_node: int) -> None:
    """Make the default group one of so many ranks, of which this process is the first."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    dist.init_process_group(
        BACKEND, store=dist.HashStore(), rank=0, world_size=nodes * ranks_per_node
    )


def _make(store: object, rank: int, size: int, timeout: object) -> EchoGroup:
    return EchoGroup(rank, size)
