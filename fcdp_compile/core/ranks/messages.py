"""Small messages of all ranks on the caller's thread, and acts that succeed on all ranks or raise on all.

The groups are CPU groups such as `Topology.control`.  doing: the message's purpose, or what returns it, for
the error if a rank does not join.  All functions raise LostRankError if a rank is lost."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.core.ranks.lost_ranks import Wait, finish, ranks_named
from fcdp_compile.errors import FcdpError

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


def broadcast_first(data: Tensor, group: dist.ProcessGroup, doing: Callable[[], str]) -> None:
    """Fill `data` with the values that the group's first rank has in its `data`."""
    work = dist.broadcast(data, group=group, group_src=0, async_op=True)
    finish(work, group, Wait(doing))


def first_other(values: Sequence[object]) -> int | None:
    """The first rank whose value differs from rank 0's; None if all are equal.  values: one of each rank."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), None)


def together(
    group: dist.ProcessGroup | None,
    act: Callable[[], T],
    error: type[FcdpError] = FcdpError,
    doing: str = "an agreement of all ranks",
) -> list[T]:
    """Call `act` on every rank and return each rank's result, by rank in the group.

    act: starts no collectives; its result is picklable and small.  group: a CPU group, such as
    `Topology.control`; None in a single process.  doing: names the act in the error if a rank does not join.

    Raises: LostRankError if a rank does not join; `error` on every rank of the group if `act` raises on any
    rank, with the message of the first rank that failed and the number of ranks that failed in other ways.
    """
    cause: Exception | None = None
    try:
        mine: tuple[bool, T | str] = (True, act())
    except Exception as raised:
        # The other ranks must learn of any exception.
        mine, cause = (False, str(raised) or type(raised).__name__), raised
    everyone: list[tuple[bool, T | str]] = [mine]
    if group is not None:
        everyone = gather_objects(mine, group, doing)
    problems = {rank: str(value) for rank, (works, value) in enumerate(everyone) if not works}
    if problems:
        raise error(_told(problems, len(everyone))) from cause
    return [value for _, value in everyone]  # type: ignore[misc]  # no rank has a message


def _told(problems: dict[int, str], ranks: int) -> str:
    first = next(iter(problems))
    alike = [rank for rank, text in problems.items() if text == problems[first]]
    if len(alike) == ranks:
        return problems[first]
    others = len(problems) - len(alike)
    more = f" ({others} other ranks failed in other ways)" if others else ""
    return f"{ranks_named(alike)}: {problems[first]}{more}"


class Attempts:
    """Acts of which one may fail on one rank, between collectives that all ranks go on with.

    [Note: no early way out] If a rank fails, it remembers its error (`error`) and goes on with the
    collectives, if need be with any values, because the other ranks wait for its messages.  From time to time
    all ranks exchange their errors (`together` with `check`); after an error, all results are thrown away.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, act: Callable[[], T]) -> T | None:
        """Call `act`, unless this rank has failed before."""
        if self.error is None:
            try:
                return act()
            except Exception as error:  # any error must reach all ranks
                self.error = error
        return None

    def check(self) -> None:
        """Raise the error that this rank has remembered; for `together`."""
        if self.error is not None:
            raise self.error
