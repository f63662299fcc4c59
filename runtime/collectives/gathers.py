"""All-gathers as tasks of a lane: plain, encoded, and the parts of other algorithms (`gathering`).

Each fills `out`, which its caller has allocated, and returns a `Begun` if it is not done yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fcdp_compile.runtime.collectives.channel import Channel, now_or_later
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
