"""Small messages between ranks on the caller's thread: numbers, objects, bytes that one rank sends to all.

The groups are CPU groups such as `Topology.control`.  doing: the message's purpose, for the error if a rank
does not join.

Raises, in every function: LostRankError.
"""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.ranks.waiting import Wait, finish

T = TypeVar("T")

# torch 2.13 renamed this function and warns of the older name, which is the only name in 2.11.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gather_at_once(out: Tensor, send: Tensor, group: dist.ProcessGroup, doing: str) -> None:
    """All-gather: [n] from every rank -> [size*n]."""
    finish(all_gather(out, send, group=group, async_op=True), group, Wait(lambda: doing))


def gather_objects(mine: T, group: dist.ProcessGroup, doing: str) -> list[T]:
    """Every rank's object, by rank in the group; the objects must be small and picklable."""
    data = pickle.dumps(mine)
    ranks = dist.get_world_size(group)
    sizes = torch.empty(ranks, dtype=torch.int64, device="cpu")
    gather_at_once(sizes, torch.tensor([len(data)], device="cpu"), group, doing)
    longest = int(sizes.max())
    send = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
    everyone = torch.empty(ranks * longest, dtype=torch.uint8, device="cpu")
    gather_at_once(everyone, send, group, doing)
    rows = zip(everyone.view(ranks, -1), sizes.tolist(), strict=True)
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in rows]


def broadcast_first(data: Tensor, group: dist.ProcessGroup, doing: str) -> None:
    """Fill `data` with the values that the group's first rank has in its `data`."""
    work = dist.broadcast(data, group=group, group_src=0, async_op=True)
    finish(work, group, Wait(lambda: doing))
