"""The host memory that the cache of one model may take, as all ranks agreed and the user asked."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from fcdp_compile.host_memory import UNLIMITED, HostBudget, Limit, detect, lockable_bytes
from fcdp_compile.mesh import Home, Topology
from fcdp_compile.plan import Bucket, Tier
from fcdp_compile.runtime.collectives import Collectives
from fcdp_compile.runtime.pinned import PinnedPool

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
    """The budget of one model's cache on this rank, and the buckets that found no place in it.

    The same on all ranks: the free memory is agreed once, the option is in the plan (a bucket that has no
    place says why), and buckets ask for places in the order of the plan.
    """

    def __init__(self, topology: Topology, home: Home) -> None:
        self._topology = topology
        self._home = home
        self._available = HostBudget(bytes=UNLIMITED, limit=Limit.NOTHING)
        self._lockable_bytes = UNLIMITED
        self._asked_bytes: int | None = None
        self._left_out: dict[int, Bucket] = {}

    def agree(self, collectives: Collectives, pool: PinnedPool, *, is_pinned: bool) -> None:
        """Find out what this machine has left and take the least of all ranks, all of which must call it.

        is_pinned: whether the cache is registered with CUDA, so that the limit of locked memory counts.
        """
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self._topology.ranks_per_node))
        found = detect(
            ranks_on_machine=max(local_ranks, self._topology.ranks_per_node),
            ranks_in_group=local_ranks,
        )
        lockable = _enforced_bytes(pool) if is_pinned else UNLIMITED
        rows = collectives.agree([found.bytes, _LIMITS.index(found.limit), lockable])
        least = min(rows, key=lambda row: row[0])
        self._available = HostBudget(bytes=least[0], limit=_LIMITS[least[1]])
        self._lockable_bytes = min(row[2] for row in rows)

    def ask(self, node_bytes: int | None) -> None:
        """Take the user's option, bytes per node; None asks for nothing.

        Raises: ValueError if an earlier graph of this model was compiled with another number.
        """
        if self._asked_bytes not in (None, node_bytes) and node_bytes is not None:
            raise ValueError(
                f"option 'host_memory' is {node_bytes} bytes, but an earlier graph of this model was "
                f"compiled with {self._asked_bytes}; give every torch.compile of one model the same"
            )
        if node_bytes is not None:
            self._asked_bytes = node_bytes

    @property
    def budget(self) -> HostBudget:
        """The least of what is free, what may be locked, and what the user asked for.

        Who asks for a number may have more than can be locked: the rest is used unregistered.
        """
        candidates = [self._available]
        if self._asked_bytes is None:
            candidates.append(HostBudget(bytes=self._lockable_bytes, limit=Limit.LOCKED))
        else:
            share = self._asked_bytes // self._topology.ranks_per_node
            candidates.append(HostBudget(bytes=share, limit=Limit.OPTION))
        return min(candidates, key=lambda budget: budget.bytes)

    def is_left_out(self, bucket: Bucket) -> bool:
        """Whether a forward found no place for the bucket."""
        return bucket.id in self._left_out

    def note(self, buckets: Iterable[Bucket]) -> None:
        """Note which buckets of a forward that caches found no place; warn of the first ones."""
        made = list(buckets)
        new = {b.id: b for b in made if b.tier is Tier.NONE and not self.is_left_out(b)}
        if new and not self._left_out and self._topology.node == self._topology.place == 0:
            lost, every = (
                sum(b.host_bytes(self._home.nodes) for b in group) for group in (new.values(), made)
            )
            log.warning(
                "%d of %d buckets (%.1f of %.1f MiB a rank) do not fit in host memory and are gathered "
                "between nodes at every use: same numbers, slower; the cache may take %.1f MiB a rank "
                "because of %s%s",
                len(new),
                len(made),
                lost / 2**20,
                every / 2**20,
                self.budget.bytes / 2**20,
                self.budget.limit.value,
                _REMEDIES[self.budget.limit],
            )
        self._left_out |= new


def _enforced_bytes(pool: PinnedPool) -> int:
    """The limit of locked memory, if CUDA's driver keeps to it."""
    limit = lockable_bytes()
    if limit is None or (limit <= _TRIED_BYTES and pool.can_register(limit + 1)):
        return UNLIMITED
    return limit
