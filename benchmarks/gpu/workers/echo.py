"""A process group of many ranks in one process: every other rank behaves as if it sent this rank's data.

    all-gather        every part of the output is a copy of this rank's part
    reduce-scatter    this rank's part of the input, times the ranks for a sum
    all-reduce        the input, times the ranks for a sum

No data is sent, but every output is written as a real group writes it, on the current stream: memory traffic
and the order of kernels are real; only the links take no time.  Ranks always seem to agree.  Other groups do
not serve: NCCL does not allow two ranks on one GPU, and torch's "fake" group does not write outputs.

Receiving from one rank is refused, because its data is not known here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "nccl_echo"
"""The name contains "nccl" so that fcdp and FSDP2 treat a card's tensors as with NCCL, on streams."""

_OF_EQUALS = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
"""Reductions that do not change a value that is equal on all ranks."""

_WIDEST = torch.complex128
"""The dtype with the largest elements."""

_Options = Any  # torch's classes of options have no public names


class EchoWork(dist.Work):
    """An issued collective: later work on its stream comes after it."""

    def __init__(self) -> None:
        super().__init__()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> bool:
        return True


class EchoGroup(dist.ProcessGroup):
    """The group; its methods have the names that torch 2.11 to 2.15 call."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._place, self._ranks = rank, size
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        # torch keeps the name in a group's backends, and this group has no backends.
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
            _copy_to_rows(rows, send.reshape(1, -1))
            return EchoWork()
        for row in rows:  # `send` is one of the rows
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
        # No measured system sends parts of several sizes, and echoing them would give wrong sums.
        if out_sizes or send_sizes:
            raise NotImplementedError("an echo group exchanges parts of one size")
        _copy_to_rows(
            out.view(self._ranks, -1), send.view(self._ranks, -1)[self._place].view(1, -1)
        )
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

    # The names up to torch 2.12; later versions still call them in some places.
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
        elif not any(op == same for same in _OF_EQUALS):  # `in` does not use their `==`
            # The result of equal values under other operations is not defined here.
            raise NotImplementedError(f"an echo group does not reduce with {op}")
        return EchoWork()


def _copy_to_rows(rows: Tensor, send: Tensor) -> None:
    """Copy a row [1, n] to all rows [m, n].

    torch copies a row element by element; with bytes, an H200 wrote 0.3 TB/s, less than its links carry.  So
    copy elements of 16 bytes where the rows consist of those.
    """
    both = (rows, send)
    if all((t.shape[1] * t.itemsize | t.data_ptr()) % _WIDEST.itemsize == 0 for t in both):
        rows, send = (t.view(_WIDEST) for t in both)
    rows.copy_(send)


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage."""
    return tensor.untyped_storage().data_ptr()


def init_echo(nodes: int, ranks_per_node: int, device: str = "cuda") -> None:
    """Make an echo group of nodes x ranks_per_node ranks the default group; this process is rank 0.

    device: the kind of device whose tensors the group takes, besides the CPU's.
    """
    if BACKEND not in dist.Backend.backend_list:
        devices = list(dict.fromkeys(["cpu", device]))
        dist.Backend.register_backend(BACKEND, _make, devices=devices)
    dist.init_process_group(
        BACKEND, store=dist.HashStore(), rank=0, world_size=nodes * ranks_per_node
    )


def _make(store: object, rank: int, size: int, timeout: object) -> EchoGroup:
    return EchoGroup(rank, size)
