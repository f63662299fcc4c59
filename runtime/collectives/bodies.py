"""The bodies of collectives: gathers and averaging reductions as tasks of a lane.

Each fills `out`, which its caller has allocated, and returns a `Begun` if it is not done yet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fcdp_compile.core.params.packing import is_narrow, padded
from fcdp_compile.runtime.collectives.channel import Channel, now_or_later
from fcdp_compile.runtime.collectives.difference import Code
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.runtime.lanes.tasks import Begun


def gather_encoded(
    out: Tensor, encoded: Tensor, send: Tensor, codec: Codec, channel: Channel
) -> Begun | None:
    """[n] of every rank -> [size*n], and in `encoded` the encoded values as they were sent, [size*bytes]."""
    left = channel.all_gather(encoded, codec.encode(send.view(1, -1)).view(-1))

    def decode() -> None:
        rows = codec.decode(encoded.view(-1, codec.bytes), out.dtype)
        out.view(rows.shape).copy_(rows)

    return now_or_later(decode, left)


def gather_differences(
    out: Tensor,
    encoded: Tensor,
    is_wrong: Tensor,
    send: Tensor,
    before: Tensor,
    sizes: Sequence[int],
    code: Code,
    node: int,
    channel: Channel,
) -> Begun | None:
    """[sizes[i]] of rank i -> [sum of sizes]; differences from `before` are sent, [bytes] of each rank.

    is_wrong: gets whether any part is, bool [1].  node: of this rank, whose own part is not decoded.
    """
    parts, old = out.split(list(sizes)), before.split(list(sizes))
    left = channel.all_gather(encoded, code.encode(send, old[node]))

    def decode() -> None:
        codes = encoded.view(channel.size, -1)
        parts[node].copy_(send)
        is_wrong.zero_()
        for i in range(channel.size):
            if i != node:
                values, is_other = code.decode(codes[i], old[i])
                parts[i].copy_(values)
                is_wrong.logical_or_(is_other)

    return now_or_later(decode, left)


def gather_parts(out: Tensor, send: Tensor, sizes: Sequence[int], channel: Channel) -> Begun | None:
    """[sizes[i]] of rank i -> [sum of sizes]."""
    copies = channel.scratch.empty(send, channel.size * send.numel())
    copies.view(channel.size, send.numel()).copy_(send)
    return channel.all_to_all(out, copies, sizes=(sizes, [send.numel()] * channel.size))


def gather_own(out: Tensor, send: Tensor, codec: Codec | None, channel: Channel) -> Begun | None:
    """[S] of every rank of a node -> [g*S], with the values that another node would decode."""
    if codec is not None:
        send = codec.decode(codec.encode(send.view(1, -1)), send.dtype).view(-1)
    return channel.all_gather(out, send)


def gather_rest(
    out: Tensor, node_shard: Tensor, own: Tensor, node: int, channel: Channel
) -> Begun | None:
    """[N*S] of every rank of node number `node`, and the node's own home shards [g*S] -> [g*N*S]."""
    slot = own.numel() * node_shard.numel() // out.numel()
    rows = node_shard.view(-1, slot)
    if node in (0, len(rows) - 1):
        others = rows[1:] if node == 0 else rows[:-1]
    else:
        others = channel.scratch.empty(node_shard, node_shard.numel() - slot).view(-1, slot)
        torch.cat([rows[:node], rows[node + 1 :]], out=others)
    arrived = channel.scratch.empty(out, out.numel() - own.numel())
    left = channel.all_gather(arrived, others.view(-1))

    def assemble() -> None:
        full = out.view(-1, len(rows), slot)
        parts = arrived.view(len(full), -1, slot)
        full[:, node] = own.view(-1, slot)
        full[:, :node] = parts[:, :node]
        full[:, node + 1 :] = parts[:, node:]

    return now_or_later(assemble, left)


def reduce_scatter(out: Tensor, send: Tensor, channel: Channel) -> Begun | None:
    """[size*n] of every rank -> the average of this rank's part [n]; sums in fp32 or wider, rounded once."""
    if channel.is_on_stream and not is_narrow(send.dtype):
        channel.reduce_scatter(out, send)
        return None
    # NCCL's reduce_scatter rounds to the dtype at every hop, and Gloo's is an all-reduce underneath, which
    # moves twice the bytes; all-to-all moves each byte once, and the sum is taken here.
    parts = channel.scratch.empty(send, send.numel())
    average = partial(_average, out, parts, channel)
    return now_or_later(average, channel.all_to_all(parts, send))


def reduce_parts(out: Tensor, send: Tensor, sizes: Sequence[int], channel: Channel) -> Begun | None:
    """[sum of sizes] of every rank -> the average of this rank's part; sums as in `reduce_scatter`."""
    parts = channel.scratch.empty(send, channel.size * out.numel())
    left = channel.all_to_all(parts, send, sizes=([out.numel()] * channel.size, sizes))
    return now_or_later(partial(_average, out, parts, channel), left)


def _average(out: Tensor, parts: Tensor, channel: Channel) -> None:
    wide = torch.promote_types(parts.dtype, torch.float32)
    total = out if out.dtype is wide else channel.scratch.empty(out, out.numel(), wide)
    torch.sum(parts.view(channel.size, out.numel()), 0, dtype=wide, out=total)
    total.div_(channel.size)
    if total is not out:
        out.copy_(total)


def all_reduce(out: Tensor, send: Tensor, channel: Channel) -> Begun | None:
    """The average of [n] in `out`, which is as long as n rounded up to a multiple of the group's size."""
    whole = padded(send, channel.size)
    mine = channel.scratch.empty(out, out.numel() // channel.size)
    left = reduce_scatter(mine, whole, channel)
    if left is not None:
        left.finish()  # not on another thread: it would meet the next collective out of order
    return channel.all_gather(out, mine)


def reduce_encoded(out: Tensor, send: Tensor, codec: Codec, channel: Channel) -> Begun | None:
    """[size*n] of every rank -> the average of this rank's part [n]; encoded once, summed when decoded."""
    encoded = codec.encode(send.view(channel.size, -1)).view(-1)
    parts = channel.scratch.empty(encoded, encoded.numel())

    def average() -> None:
        wide = torch.promote_types(out.dtype, torch.float32)
        rows = codec.decode(parts.view(channel.size, -1), wide)
        out.copy_(rows.sum(0).div_(channel.size))

    return now_or_later(average, channel.all_to_all(parts, encoded))
