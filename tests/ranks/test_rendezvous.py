"""Restarted ranks find each other in the same store, and no rank of the attempt before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from fcdp_compile.core.ranks.rendezvous import name_of_attempt
from fcdp_compile.errors import LostRankError

RANKS = 4
LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.2)


def test_every_attempt_has_one_name_of_its_own() -> None:
    store = dist.HashStore()
    names = []
    for attempt in range(3):
        order = [*range(attempt, RANKS), *range(attempt)]  # another rank is first each time
        with ThreadPoolExecutor(RANKS) as pool:
            found = list(pool.map(lambda rank: name_of_attempt(store, rank, RANKS, LONG), order))
        assert len(set(found)) == 1
        names.append(found[0])
        if attempt == 0:
            with pytest.raises(LostRankError, match="rank 1, 2, 3 did not join within"):
                name_of_attempt(store, 0, RANKS, SHORT)  # an attempt that fails at its start
            with pytest.raises(LostRankError, match="rank 0 did not join within"):
                name_of_attempt(store, 2, RANKS, SHORT)
    assert len(set(names)) == len(names)
