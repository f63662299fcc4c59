"""A group of ranks, and how its collectives work on tensors of a device.

on the host                       blocks its caller; done in two parts
on a GPU, collectives on streams  given to the lane's own stream
on a GPU, collectives that block  through pinned memory of the host
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.core.ranks.lost_ranks import Wait, finish
from fcdp_compile.core.ranks.messages import all_gather
from fcdp_compile.devices import Device, StreamDevice
from fcdp_compile.runtime.lanes.lanes import Scratch
from fcdp_compile.runtime.lanes.tasks import Begun

# torch 2.13 renamed it and warns of the older name; torch 2.11 has only the older name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def now_or_later(last: Callable[[], None], left: Begun | None) -> Begun | None:
    """Do `last` when `left` is finished: now, if nothing is left."""
    if left is None:
        last()
        return None

    def both() -> None:
        left.finish()
        last()

    return Begun(both)


@dataclass(frozen=True, slots=True)
class Channel:
    """One collective's group, the number of ranks in it, their device, and how to wait for them.

    scratch: the memory for what only the collective needs.
    """

    group: dist.ProcessGroup | None
    size: int
    device: Device
    wait: Wait
    scratch: Scratch

    @property
    def is_on_stream(self) -> bool:
        """Whether collectives are given to the current stream."""
        return self.device.runs_on_stream(self.group)

    def reduce_scatter(self, out: Tensor, send: Tensor) -> None:
        """[size*n] of every rank -> the average of this rank's part [n], computed by a group on streams."""
        _reduce_scatter(out, send, op=dist.ReduceOp.AVG, group=self.group, async_op=False)

    def all_gather(self, out: Tensor, send: Tensor) -> Begun | None:
        """[n] of every rank -> [size*n]."""
        return self._run(partial(all_gather, group=self.group), out, send)

    def all_to_all(
        self,
        out: Tensor,
        send: Tensor,
        *,
        sizes: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> Begun | None:
        """[size*n], one part for each rank -> [size*n], one part of each rank.

        sizes: elements from each rank and for each rank, if parts have different sizes.
        """
        bytes_: list[list[int]] = [[n * send.itemsize for n in part] for part in sizes or ()]
        run = partial(dist.all_to_all_single, group=self.group)
        if sizes is not None:
            run = partial(run, output_split_sizes=bytes_[0], input_split_sizes=bytes_[1])
        return self._run(run, out, send)

    def _run(self, collective: Callable[..., dist.Work], out: Tensor, send: Tensor) -> Begun | None:
        # Bytes are sent, whatever the dtype.  The views are made here, on the lane: views made in the
        # caller's inference mode could not be written.
        out, send = out.view(torch.uint8), send.view(torch.uint8)
        if self.is_on_stream:
            # Not asynchronously: NCCL would take its own stream and make the lane's stream wait for it.
            collective(out, send, async_op=False)
            return None
        is_staged = isinstance(self.device, StreamDevice)
        staged = self._on_host(send) if is_staged else send
        arrived = self.device.pinned_like(out) if is_staged else out
        work = collective(arrived, staged, async_op=True)

        def end() -> None:
            finish(work, self.group, self.wait)
            if is_staged:
                # The allocator of pinned memory notes which stream reads `arrived`, so it may be released.
                out.copy_(arrived, non_blocking=True)

        return Begun(end)

    def _on_host(self, tensor: Tensor) -> Tensor:
        """A pinned copy, complete."""
        host = self.device.pinned_like(tensor).copy_(tensor, non_blocking=True)
        self.device.synchronize()  # waits for this lane's stream, not on the main Python thread
        return host
