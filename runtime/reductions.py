"""Averaging reduce-scatters and all-reduces as tasks of a lane.

Each fills `out`, which its caller has allocated, and returns what is left to do if it has only begun.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.mesh import has_nccl
from fcdp_compile.narrow_sums import is_narrow
from fcdp_compile.packing import padded
from fcdp_compile.quantize import Codec
from fcdp_compile.runtime.gathers import gather
from fcdp_compile.runtime.group_work import now_or_later, on_host, to_device
from fcdp_compile.runtime.tasks import Begun
from fcdp_compile.waiting import Wait, finish

_Group = dist.ProcessGroup | None

# torch 2.13 renamed it and warns of the older name, the only one of 2.11.
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def reduce_scatter(out: Tensor, send: Tensor, group: _Group, size: int, wait: Wait) -> Begun | None:
    """[size*n] of every rank -> the average of its part [n], summed in fp32 or wider and rounded once."""
    on_stream = send.is_cuda and has_nccl(group)
    if on_stream and not is_narrow(send.dtype):
        _reduce_scatter(out, send, op=dist.ReduceOp.AVG, group=group, async_op=True).wait()
        return None
    # NCCL's reduce_scatter rounds to the dtype at every hop, and Gloo's is an all-reduce underneath, which
    # moves twice the bytes; all-to-all moves the right ones, and leaves the sum to us.
    staged = on_host(send) if send.is_cuda and not on_stream else send
    parts = torch.empty_like(staged)
    work = dist.all_to_all_single(parts, staged, group=group, async_op=True)
    if on_stream:
        work.wait()  # makes the current stream wait

    def average() -> None:
        wide = torch.promote_types(parts.dtype, torch.float32)
        found = parts.view(size, -1).sum(0, dtype=wide).div_(size)
        if found.device == out.device:
            out.copy_(found)
        else:
            to_device(out, found.to(out.dtype).pin_memory())

    return now_or_later(average, None if on_stream else Begun(lambda: finish(work, group, wait)))


def all_reduce(out: Tensor, send: Tensor, group: _Group, size: int, wait: Wait) -> Begun | None:
    """The average of [n] in `out`, which is as long as n rounded up to a multiple of the group's size."""
    whole = padded(send, size)
    mine = torch.empty_like(out[: out.numel() // size])
    left = reduce_scatter(mine, whole, group, size, wait)
    if left is not None:
        left.finish()  # here: what another thread began would meet the next collective out of order
    return gather(out, mine, group, wait)


def reduce_encoded(
    out: Tensor, send: Tensor, codec: Codec, group: _Group, size: int, wait: Wait
) -> Begun | None:
    """[size*n] of every rank -> the average of its part [n], encoded once and summed once decoded."""
    on_stream = send.is_cuda and has_nccl(group)
    encoded = codec.encode(send.view(size, -1))
    staged = on_host(encoded.view(-1)) if send.is_cuda and not on_stream else encoded.view(-1)
    parts = torch.empty_like(staged)
    work = dist.all_to_all_single(parts, staged, group=group, async_op=True)
    if on_stream:
        work.wait()  # makes the current stream wait

    def average() -> None:
        wide = torch.promote_types(out.dtype, torch.float32)
        rows = codec.decode(parts.view(size, -1).to(out.device), wide)
        out.copy_(rows.sum(0).div_(size))

    return now_or_later(average, None if on_stream else Begun(lambda: finish(work, group, wait)))
