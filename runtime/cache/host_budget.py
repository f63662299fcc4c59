"""The host memory that the cache of one model may take, as all ranks agreed and the user asked."""

from __future__ import annotations

import functools
import logging
import operator
import os
import weakref
from collections.abc import Sequence

from fcdp_compile.cluster.free_memory import UNLIMITED, HostBudget, Limit, detect, lockable_bytes
from fcdp_compile.errors import ArgumentError
from fcdp_compile.params.mesh import Topology
from fcdp_compile.plan import Bucket
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.agreement import FLAGS_OF_A_WORD
from fcdp_compile.runtime.collectives.collectives import Collectives

log = logging.getLogger(__name__)

_LIMITS = list(Limit)

# Distributions' defaults are 64 KiB and 8 MiB, and NVIDIA's driver does not count what it registers: limits
# up to this size are tried before they are believed.
_TRIED_BYTES = 64 * 2**20

_REMEDIES = {
    Limit.NOTHING: "",
    Limit.AVAILABLE: "; free host memory",
    Limit.CGROUP: "; raise the memory limit of the container or job",
    Limit.LOCKED: "; raise ulimit -l, or set options={'host_memory': …} for more, not registered",
    Limit.OPTION: "; raise it",
}


class HostMemory:
    """The budget of one model's cache on this rank.

    The same on all ranks: the free memory is agreed once, and the option is in the plan (a bucket that has no
    place says why).

    planned_bytes: what the plans of the model's graphs take of it.

    Models on one mesh share what is free.  What another one had in use when this one looked is not free, but
    part of what that one plans to use, which comes off as a whole; until all ranks know that it is gone, for
    garbage is not collected on all at once.
    """

    def __init__(self, topology: Topology) -> None:
        self._ranks_per_node = topology.ranks_per_node
        self._is_first = topology.node == topology.place == 0
        self._available = HostBudget(bytes=UNLIMITED, limit=Limit.NOTHING)
        self._lockable_bytes = UNLIMITED
        self._asked_bytes: int | None = None
        self.planned_bytes = 0
        self._has_warned = False
        self._pool: PinnedPool | None = None
        self._has_ended = False
        self._together = _sharing.setdefault(topology, [])
        self._together.append(self)

    def agree(self, collectives: Collectives, pool: PinnedPool, *, is_pinned: bool) -> None:
        """Find out what this machine has left and take the least of all ranks, all of which must call it.

        is_pinned: whether the cache is registered with CUDA, so that the limit of locked memory counts.
        """
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self._ranks_per_node))
        found = detect(
            ranks_on_machine=max(local_ranks, self._ranks_per_node),
            ranks_in_group=local_ranks,
        )
        lockable = _enforced_bytes(pool) if is_pinned else UNLIMITED
        in_use = sum(other.in_use_bytes for other in self._others())
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
        """The least of what is free, what may be locked, and what the user asked for.

        Who asks for a number may have more than can be locked: the rest is used unregistered.
        """
        others = sum(other.planned_bytes for other in self._others())
        candidates = [_less(self._available, others)]
        if self._asked_bytes is None:
            lockable = HostBudget(bytes=self._lockable_bytes, limit=Limit.LOCKED)
            candidates.append(_less(lockable, others))
        else:
            share = self._asked_bytes // self._ranks_per_node
            candidates.append(HostBudget(bytes=share, limit=Limit.OPTION))
        return min(candidates, key=lambda budget: budget.bytes)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of host memory that this model has now."""
        return 0 if self._pool is None else self._pool.slab_bytes

    def end(self) -> None:
        """The model is gone."""
        self._has_ended = True

    def _others(self) -> list[HostMemory]:
        return [other for other in self._together if other is not self]

    def warn(self, without_room: Sequence[Bucket], wanting: Sequence[Bucket]) -> None:
        """Say once, on one rank, that buckets which are to be kept on the host found no room there.

        wanting: all of their graph that are to be kept there.
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
    """The limit of locked memory, if CUDA's driver keeps to it."""
    limit = lockable_bytes()
    if limit is None or (limit <= _TRIED_BYTES and pool.can_register(limit + 1)):
        return UNLIMITED
    return limit
