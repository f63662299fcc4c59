"""Run a function on every rank so that all ranks succeed or all raise: no rank waits for a failed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from fcdp_compile.errors import FcdpError
from fcdp_compile.ranks.differences import ranks_named
from fcdp_compile.ranks.messages import gather_objects

T = TypeVar("T")


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
