"""All-gathers as tasks of a lane: plain, encoded, and the parts of other algorithms (`gathering`).

Each fills `out`, which its caller has allocated, and returns what is left to do if it has only begun.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.mesh import has_nccl
from fcdp_compile.messages import all_gather
from fcdp_compile.quantize import Codec
from fcdp_compile.runtime.group_work import now_or_later, on_host, pinned, to_device
from fcdp_compile.runtime.tasks import Begun
from fcdp_compile.waiting import Wait, finish

_Group = dist.ProcessGroup | None


def gather(out: Tensor, send: Tensor, group: _Group, wait: Wait) -> Begun | None:
    """[n] of every rank -> [size*n]."""
    if send.is_cuda and has_nccl(group):
        _start(out, send, group).wait()  # makes the current stream wait
        return None
    staged = on_host(send) if send.is_cuda else send
    arrived = pinned(staged, out.numel()) if send.is_cuda else out
    work = _start(arrived, staged, group)

    def end() -> None:
        finish(work, group, wait)
        if arrived is not out:
            to_device(out, arrived)

    return Begun(end)


def gather_encoded(
    out: Tensor, encoded: Tensor, send: Tensor, codec: Codec, group: _Group, wait: Wait
) -> Begun | None:
    """[n] of every rank -> [size*n], and the same in `encoded` as it travelled, [size*bytes]."""
    left = gather(encoded, codec.encode(send.view(1, -1)).view(-1), group, wait)

    def decode() -> None:
        rows = codec.decode(encoded.view(-1, codec.bytes), out.dtype)
        out.view(rows.shape).copy_(rows)

    return now_or_later(decode, left)


def gather_own(
    out: Tensor, send: Tensor, codec: Codec | None, group: _Group, wait: Wait
) -> Begun | None:
    """[S] of every rank of a node -> [g*S], as it would have come from another node."""
    if codec is not None:
        send = codec.decode(codec.encode(send.view(1, -1)), send.dtype).view(-1)
    return gather(out, send, group, wait)


def gather_rest(
    out: Tensor, node_shard: Tensor, own: Tensor, node: int, group: _Group, wait: Wait
) -> Begun | None:
    """[N*S] of every rank of a node, which is number `node`, and all of that node's own [g*S] -> [g*N*S]."""
    slot = own.numel() * node_shard.numel() // out.numel()
    rows = node_shard.view(-1, slot)
    if node in (0, len(rows) - 1):
        others = rows[1:] if node == 0 else rows[:-1]
    else:
        others = torch.cat([rows[:node], rows[node + 1 :]])
    arrived = torch.empty_like(out[: out.numel() - own.numel()])
    left = gather(arrived, others.reshape(-1), group, wait)

    def assemble() -> None:
        full = out.view(-1, len(rows), slot)
        parts = arrived.view(len(full), -1, slot)
        full[:, node] = own.view(-1, slot)
        full[:, :node] = parts[:, :node]
        full[:, node + 1 :] = parts[:, node:]

    return now_or_later(assemble, left)


def gather_flat(
    out: Tensor, send: Tensor, codec: Codec | None, group: _Group, order: Tensor, wait: Wait
) -> Begun | None:
    """[S] of every rank of the mesh -> [G*S]; order: the rank in the group that has each part."""
    if codec is None:
        arrived = torch.empty_like(out)
        left = gather(arrived, send, group, wait)
    else:
        arrived = out.new_empty(len(order) * codec.bytes, dtype=torch.uint8)
        left = gather(arrived, codec.encode(send.view(1, -1)).view(-1), group, wait)

    def assemble() -> None:
        rows = arrived.view(len(order), -1)
        if codec is not None:
            rows = codec.decode(rows, out.dtype)
        torch.index_select(rows, 0, order, out=out.view(rows.shape))

    return now_or_later(assemble, left)


def _start(out: Tensor, send: Tensor, group: _Group) -> dist.Work:
    # Bytes travel, whatever the dtype.  Views taken here, as the caller's inference mode would spoil them.
    work: dist.Work = all_gather(
        out.view(torch.uint8), send.view(torch.uint8), group=group, async_op=True
    )
    return work
