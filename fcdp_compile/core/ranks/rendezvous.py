"""Find the other ranks of one attempt of a job that torchrun may start several times.

torchrun (torch 2.13) keeps its store when it starts the ranks again, and the store still has the addresses
that the previous attempt wrote there.  A rank that reads such an address waits for a process that is gone.
So the ranks first agree on a name that no earlier attempt had, and use the name as a prefix of their keys.

    rank r                             rank 0
    hello/r = r's word          ─▶     reads r's word, perhaps an old word first
    reads welcome/r's word      ◀─     welcome/word = the name, for every word that it reads
    thanks/the name/r           ─▶     repeats this until all ranks have thanked

Words and the name are random: no rank reads the answer to an old word, or thanks for an old name.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fcdp_compile.errors import LostRankError

_LOOK_S = 0.02


def initialise(backend: str, timeout: timedelta | None) -> None:
    """Initialise torch.distributed with the ranks that torchrun has started.

    Raises: LostRankError if other ranks do not join.
    """
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not is_kept or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, ranks = next(rendezvous("env://"))
    name = name_of_attempt(store, rank, ranks, timeout or default_pg_timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore(name, store),
        rank=rank,
        world_size=ranks,
        timeout=timeout,
    )


def name_of_attempt(store: Any, rank: int, ranks: int, timeout: timedelta) -> str:
    """Agree on a name that all ranks of this attempt share and that no earlier attempt had.

    Raises: LostRankError.
    """
    until_s = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        name = secrets.token_hex(8)
        missing = list(range(1, ranks))
        while missing:
            for other in missing:
                if store.check([f"fcdp/hello/{other}"]):
                    word = store.get(f"fcdp/hello/{other}").decode()
                    store.set(f"fcdp/welcome/{word}", name)
            missing = [r for r in missing if not store.check([f"fcdp/thanks/{name}/{r}"])]
            _look(until_s, missing, timeout)
        return name
    word = secrets.token_hex(8)
    store.set(f"fcdp/hello/{rank}", word)
    while not store.check([f"fcdp/welcome/{word}"]):
        _look(until_s, [0], timeout)
    found: str = store.get(f"fcdp/welcome/{word}").decode()
    store.set(f"fcdp/thanks/{found}/{rank}", "")
    return found


def _look(until_s: float, missing: Sequence[int], timeout: timedelta) -> None:
    """Wait before another look at the store, if ranks are missing; raises: LostRankError if time is up."""
    if not missing:
        return
    if time.monotonic() >= until_s:
        shown = ", ".join(map(str, missing[:8]))
        raise LostRankError(
            f"make_mesh: rank {shown} did not join within {timeout.total_seconds():.0f} s; find the "
            "cause in the logs of the ranks, then restart the job"
        )
    time.sleep(_LOOK_S)
