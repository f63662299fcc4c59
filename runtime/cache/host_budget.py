"""The host memory that one model's cache may take: agreed by all ranks, and limited by the user."""

from __future__ import annotations

import functools
import gc
import logging
import operator
import os
import weakref
from collections.abc import Sequence

from fcdp_compile.cluster.free_memory import UNLIMITED, HostBudget, Limit, detect, lockable_bytes
from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.plan import Bucket
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.agreement import FLAGS_OF_A_WORD
from fcdp_compile.runtime.collectives.collectives import Collectives

log = logging.getLogger(__name__)

_LIMITS = list(Limit)

# Linux distributions' defaults are 64 KiB and 8 MiB, and NVIDIA's driver does not count memory that it
# registers: a limit up to this size is tried before it counts.
_TRIED_BYTES = 64 * 2**20

_REMEDIES = {
    Limit.NOTHING: "",
    Limit.AVAILABLE: "; free host memory",
    Limit.CGROUP: "; raise the memory limit of the container or job",
    Limit.LOCKED: "; raise ulimit -l, or set options={'host_memory': …} to also use "
    "memory that is not registered with the device",
    Limit.OPTION: "; raise it",
}


class HostMemory:
    """The budget of one model's cache on this rank.

    It is the same on all ranks: ranks agree once on the free memory, and the option is in the plan (a bucket
    without a place says why).

    planned_bytes: how many bytes the plans of the model's graphs take.  unplanned_bytes: what other copies
    take (`runtime.outside`) and what was booked; later plans leave room for them.
    home_bytes: of home shards and not in slabs (`parameters.home_memory`).
    freed_bytes: freed on this rank and not yet agreed; the next `book` agrees on it.

    Models on one mesh share host memory, the user's number too: subtract what each other model has planned.
    Memory that another model already uses is part of its plan, so it first counts as free.  A model that is
    gone counts until all ranks know that, because garbage is not collected on all ranks at once.
    """

    def __init__(self, topology: Topology) -> None:
        self._ranks_per_node = topology.ranks_per_node
        self._is_first = topology.node == topology.place == 0
        self._available = HostBudget(bytes=UNLIMITED, limit=Limit.NOTHING)
        self._lockable_bytes = UNLIMITED
        self._asked_bytes: int | None = None
        self.planned_bytes = self.unplanned_bytes = self.freed_bytes = self.home_bytes = 0
        self._has_warned = False
        self._pool: PinnedPool | None = None
        self._has_ended = False
        self._together = _sharing.setdefault(topology, [])
        self._together.append(self)

    def agree(self, collectives: Collectives, pool: PinnedPool, *, is_pinned: bool) -> None:
        """Find the free memory of this machine and take the smallest value of all ranks; all must call it.

        is_pinned: whether the cache is registered with CUDA, so that the limit of locked memory counts.
        """
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self._ranks_per_node))
        found = detect(
            ranks_on_machine=max(local_ranks, self._ranks_per_node),
            ranks_in_group=local_ranks,
        )
        lockable = _enforced_bytes(pool) if is_pinned else UNLIMITED
        if self._others():
            gc.collect()  # models that nothing but a cycle holds are gone, too
        in_use = sum(memory.in_use_bytes for memory in self._together)
        available = min(UNLIMITED, found.bytes + in_use)
        self._pool = pool
        ended = sum(m._has_ended << i for i, m in enumerate(self._together[:FLAGS_OF_A_WORD]))
        words = [available, _LIMITS.index(found.limit), lockable, ended]
        rows = collectives.agree(words, "the agreement on host memory")
        gone = functools.reduce(operator.and_, (row[3] for row in rows))
        self._together[:] = [m for i, m in enumerate(self._together) if not gone >> i & 1]
        least = min(rows, key=lambda row: row[0])
        self._available = HostBudget(bytes=least[0], limit=_LIMITS[least[1]])
        self._lockable_bytes = min(row[2] for row in rows)

    def book(
        self,
        what: str,
        size_bytes: int,
        collectives: Collectives,
        pool: PinnedPool,
        *,
        is_pinned: bool,
    ) -> int:
        """Take host memory for something that no plan knows; returns the bytes booked, as on all ranks.

        All ranks must call it.  what: names it, in the plural, for the error.  size_bytes: for this rank.

        Raises: FcdpError on every rank if any rank has no room.
        """
        if self._pool is None:
            self.agree(collectives, pool, is_pinned=is_pinned)
        rows = collectives.agree(
            [size_bytes, self.freed_bytes], f"the agreement on room for {what}"
        )
        gone = min(row[1] for row in rows)
        self.unplanned_bytes -= gone
        self.freed_bytes -= gone
        needed, budget = max(row[0] for row in rows), self.budget
        room = budget.bytes - self.planned_bytes
        if needed > room:
            raise FcdpError(
                f"{what} take {needed} bytes of host memory a rank, but only {max(0, room)} bytes are left "
                f"because of {budget.limit.value}{_REMEDIES[budget.limit]}"
            )
        self.unplanned_bytes += needed
        return needed

    def ask(self, node_bytes: int | None) -> None:
        """Take the user's option, bytes per node; None asks for nothing.

        Raises: ValueError if an earlier graph of this model was compiled with another number.
        """
        if self._asked_bytes not in (None, node_bytes) and node_bytes is not None:
            raise ArgumentError(
                f"option 'host_memory' is {node_bytes} bytes, but an earlier graph of this model was "
                f"compiled with {self._asked_bytes}; give every torch.compile of one model the same value"
            )
        if node_bytes is not None:
            self._asked_bytes = node_bytes

    @property
    def budget(self) -> HostBudget:
        """The least of the free memory, the limit of locked memory, and the user's number.

        The limit of locked memory does not count if the user gave a number: the rest is used unregistered.
        """
        others = sum(other.planned_bytes + other.unplanned_bytes for other in self._others())
        others += self.unplanned_bytes
        if self._asked_bytes is None:
            limit = HostBudget(bytes=self._lockable_bytes, limit=Limit.LOCKED)
        else:
            share = self._asked_bytes // self._ranks_per_node
            limit = HostBudget(bytes=share, limit=Limit.OPTION)
        candidates = [_less(budget, others) for budget in (self._available, limit)]
        return min(candidates, key=lambda budget: budget.bytes)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of host memory that this model has now."""
        return self.home_bytes + (0 if self._pool is None else self._pool.slab_bytes)

    def end(self) -> None:
        """Note that the model is gone."""
        self._has_ended = True

    def _others(self) -> list[HostMemory]:
        return [other for other in self._together if other is not self]

    def warn(self, without_room: Sequence[Bucket], wanting: Sequence[Bucket]) -> None:
        """Warn once, on one rank, that buckets found no room on the host.

        wanting: all buckets of their graph that are to be kept on the host.
        """
        if self._has_warned or not without_room:
            return
        self._has_warned = True
        if not self._is_first:
            return
        lost, every = (sum(b.host_bytes for b in group) for group in (without_room, wanting))
        log.warning(
            "%d of %d buckets (%.1f of %.1f MiB a rank) do not fit in host memory and are gathered "
            "between nodes at every use: same numbers, slower; the cache may take %.1f MiB a rank "
            "because of %s%s",
            len(without_room),
            len(wanting),
            lost / 2**20,
            every / 2**20,
            self.budget.bytes / 2**20,
            self.budget.limit.value,
            _REMEDIES[self.budget.limit],
        )


_sharing: weakref.WeakKeyDictionary[Topology, list[HostMemory]] = weakref.WeakKeyDictionary()
"""The models of each mesh."""


def _less(budget: HostBudget, taken_bytes: int) -> HostBudget:
    if budget.bytes == UNLIMITED:
        return budget
    return HostBudget(bytes=max(0, budget.bytes - taken_bytes), limit=budget.limit)


def _enforced_bytes(pool: PinnedPool) -> int:
    """The limit of locked memory if CUDA's driver obeys it, else `UNLIMITED`."""
    limit = lockable_bytes()
    if limit is None or (limit <= _TRIED_BYTES and pool.can_register(limit + 1)):
        return UNLIMITED
    return limit
