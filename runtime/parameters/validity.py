"""Which gathered copies are valid: generations, what tells that values have changed, and what ranks agree on.

    look    what this rank sees: which copies are outdated, and which buckets it would not keep whole
    agree   what any rank sees
    apply   outdated copies get another generation, buckets are kept whole or no longer are

A parameter has a generation, a number that grows when its values change.  It changes when an optimizer that
owns it steps, on `load_state_dict`, and when somebody may have written to it in any other way and its
fingerprint has changed.  A bucket's generation is the largest of its parameters'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fcdp_compile.params.fingerprint import fingerprints
from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.params.home_tensor import HomeTensor, seal
from fcdp_compile.params.mesh import Topology
from fcdp_compile.params.seal import Seal
from fcdp_compile.plan import Bucket
from fcdp_compile.runtime.cache.host_cache import NodeShardCache
from fcdp_compile.runtime.collectives.agreement import About, any_rank
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.parameters.record import Records
from fcdp_compile.runtime.parameters.unset import Unset


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one rank sees before a graph runs or, once all have agreed, what any rank sees.

    stale: of each bucket by id, whether its copy is missing or outdated.  refused: of each that may be kept
    whole, whether it must not be.  is_given: whether the graph is given other values than the model's own.
    """

    stale: Mapping[int, bool]
    refused: Mapping[int, bool]
    is_given: bool


class Validity:
    """Says of a model's gathered copies whether they are valid; every rank makes the same calls.

    unset: what has no values yet.
    """

    def __init__(
        self,
        topology: Topology,
        records: Records,
        unset: Unset,
        cache: NodeShardCache,
        collectives: Collectives,
    ) -> None:
        self._topology = topology
        self._records = records
        self._unset = unset
        self._cache = cache
        self._collectives = collectives
        self._seals = Seals()
        self.generations = Generations(records)

    # --- before a graph runs ------------------------------------------------------------------------------

    def check(self, buckets: Sequence[Bucket], about: About, *, is_given: bool = False) -> Verdict:
        """Agree with all ranks on what is about to run, and on which of these buckets are to be gathered.

        Raises: PlanMismatchError on every rank if ranks are about to run different plans, FcdpError on every
        rank if anything has no values yet.
        """
        self._unset.refuse("a forward")
        seen = self.look(buckets, is_given=is_given)
        agreed = self.agree(seen, about)
        self.apply(buckets, seen, agreed)
        return agreed

    def look(self, buckets: Sequence[Bucket], *, is_given: bool) -> Verdict:
        """What this rank sees of these buckets; asks nobody."""
        self.notice(buckets)
        choosing = [b for b in buckets if b.strategy.may_keep_full and b.ranks_per_node > 1]
        return Verdict(
            stale={b.id: self._cache.generation(b.id) != self.generation(b) for b in buckets},
            refused={b.id: not self._cache.wants_in_full(b) for b in choosing},
            is_given=is_given,
        )

    def agree(self, seen: Verdict, about: About) -> Verdict:
        """What any rank sees; changes nothing."""
        flags = [*seen.stale.values(), *seen.refused.values(), seen.is_given]
        *found, is_given = any_rank(self._collectives, about, flags)
        count = len(seen.stale)
        return Verdict(
            stale=dict(zip(seen.stale, found[:count], strict=True)),
            refused=dict(zip(seen.refused, found[count:], strict=True)),
            is_given=is_given,
        )

    def apply(self, buckets: Sequence[Bucket], seen: Verdict, agreed: Verdict) -> None:
        """Give outdated copies another generation, and keep whole what all ranks want whole."""
        for bucket in buckets:
            if agreed.stale[bucket.id] and not seen.stale[bucket.id]:
                # Another rank's shard changed: the copy here is as outdated as there.
                self.values_changed(self._records.keys_of(bucket))
        for bucket in buckets:
            if bucket.id not in agreed.refused:
                continue
            keeps = not agreed.refused[bucket.id]
            if keeps and not self._cache.keeps_in_full(bucket):
                self._records.shards(
                    bucket
                )  # those that only the host has come back before it lets go
            home = self._topology.home(bucket.strategy.home)
            self._cache.agree_in_full(bucket, home, agreed=keeps)

    # --- what has changed ---------------------------------------------------------------------------------

    def notice(self, buckets: Sequence[Bucket]) -> None:
        """Find out what of these buckets may have changed since the last time: that has a new generation.

        Not of those that every rank has whole, which nobody gathers again: autograd has saved their
        parameters for the backward, and sees every change but those by optimizers, which generations tell.
        """
        keys = dict.fromkeys(k for b in buckets if b.ranks > 1 for k in self._records.keys_of(b))
        if found := self._seals.changed({key: self._records[key].parameter() for key in keys}):
            self.values_changed(found)
            for key in found:
                self._records[key].local()  # raises if what was put there is no home shard

    def generation(self, bucket: Bucket) -> int:
        """The generation of a bucket's parameters."""
        return self.generations.of(self._records.keys_of(bucket))

    def values_changed(self, keys: Iterable[str] | None = None) -> None:
        """The values of these parameters are not what they were; of all, without keys."""
        self.generations.change(self._records if keys is None else keys)

    def values_arrived(self, keys: Sequence[str], buffers: Iterable[str] = ()) -> None:
        """All of these parameters (by key) was written, and of these buffers (by name)."""
        self._unset.arrived(keys, buffers)
        self.values_changed(keys)


class Generations:
    """Generations of a model's parameters; every rank makes the same calls and has the same numbers."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._clock = 0
        self._of = dict.fromkeys(keys, 0)

    def change(self, keys: Iterable[str]) -> None:
        """The values of these parameters are not what they were."""
        self._clock += 1
        for key in keys:
            self._of[key] = self._clock

    def of(self, keys: Iterable[str]) -> int:
        """The generation of a bucket of these parameters."""
        return max((self._of[key] for key in keys), default=0)


def read(values: Tensor) -> list[Any]:
    """The numbers in a tensor.  The Python thread waits for the device, which no ordinary step does.

    Whatever a step reads of a device it reads here.
    """
    found: list[Any] = values.tolist()
    return found


class Seals:
    """The seals that a model has put on its parameters, by key (`seal`, [Note: seals])."""

    def __init__(self) -> None:
        self._own: dict[str, Seal] = {}

    def changed(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """The keys of those of these parameters that may have other values than when this was last asked.

        All are sealed, so that next time it is known what nobody has touched.  One that is looked at for the
        first time counts as changed, and so does one that cannot be sealed, or that has another seal than the
        one put on here under its key: it was exchanged, or another model looks at it, too.  Waits for the
        device only for those whose memory others got hold of.
        """
        keys = [key for key, p in parameters.items() if not isinstance(p, HomeShard)]
        touched: dict[str, HomeShard] = {}
        for key, p in parameters.items():
            if isinstance(p, HomeShard) and not (
                self._has(key, p) and self._own[key].is_intact(p.held)
            ):
                touched[key] = p
        comparable = {
            key: p
            for key, p in touched.items()
            if self._has(key, p) and self._own[key].mark is not None
        }
        differ = dict(zip(comparable, differing(list(comparable.values())), strict=True))
        keys += [key for key in touched if differ.get(key, True)]
        if touched:
            seal(list(touched.values()))
        for key, p in touched.items():
            assert p.seal is not None, "it was put on just now"
            self._own[key] = p.seal
        return keys

    def _has(self, key: str, parameter: HomeShard) -> bool:
        return parameter.seal is not None and parameter.seal is self._own.get(key)


def differing(tensors: Sequence[HomeTensor]) -> list[bool]:
    """For each tensor with a broken seal, whether its values are others than it was sealed with."""
    if not tensors:
        return []
    then = [t.seal.mark for t in tensors if t.seal is not None and t.seal.mark is not None]
    assert len(then) == len(tensors), "seals that are intact have no marks"
    now = fingerprints([[t.present()] for t in tensors])
    return [bool(differs) for differs in read(now != torch.stack(then))]
