"""Find out which gathered copies are valid: generations, signs that values have changed, and an agreement.

    look    on this rank: which copies are outdated, and which buckets it would not keep whole
    agree   of all ranks: a finding of any rank counts for all
    apply   outdated copies get another generation, buckets are kept whole or no longer are

A parameter has a generation, a number that grows when its values change: when an optimizer that owns it
steps, on `load_state_dict`, and when it may have been written to in any other way and its fingerprint has
changed.  A bucket's generation is the largest of its parameters' generations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.seals import Seal, fingerprints, seal
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.references import References
from fcdp_compile.runtime.collectives.agreement import About, any_rank
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.lanes.reads import read
from fcdp_compile.runtime.parameters.record import Generations, Records
from fcdp_compile.runtime.parameters.unset import Unset


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The findings of one rank before a graph runs or, after the agreement, those of any rank.

    stale: for each bucket by id, whether its copy is missing or outdated.  refused: for each bucket that may
    be kept whole, whether it must not be.  is_given: whether the graph is given other values than the model's
    own.  is_outdated: whether transfers that started early may be of no use (`runtime.seams`).
    are_open: whether ranks must agree on differences (`references`).
    """

    stale: Mapping[int, bool]
    refused: Mapping[int, bool]
    is_given: bool
    is_outdated: bool
    are_open: bool


class Validity:
    """Decides which gathered copies of a model are valid; every rank makes the same calls.

    unset: parameters and buffers that have no values yet.  references: of differences.
    """

    def __init__(
        self,
        records: Records,
        unset: Unset,
        generations: Generations,
        collectives: Collectives,
        references: References,
    ) -> None:
        self._records = records
        self._unset = unset
        self.generations = generations
        self._collectives = collectives
        self._references = references
        self._seals = Seals()

    # --- before a graph runs ------------------------------------------------------------------------------

    def check(
        self,
        buckets: Sequence[BoundBucket],
        about: About,
        *,
        is_given: bool = False,
        early: Sequence[BoundBucket] = (),
        is_outdated: Callable[[], bool] = lambda: False,
    ) -> Verdict:
        """Agree with all ranks on what is about to run, and on which of these buckets are to be gathered.

        early: buckets whose transfers have started.  is_outdated: whether these may be of no use; asked when
        changes of their parameters have been noticed.

        Raises: PlanMismatchError on every rank if ranks are about to run different plans, FcdpError on every
        rank if anything has no values yet.
        """
        self._unset.refuse("a forward")
        self.notice([*buckets, *early])
        seen = _seen(
            buckets,
            is_given=is_given,
            is_outdated=is_outdated(),
            are_open=self._references.are_open,
        )
        agreed = self.agree(seen, about)
        self.apply(buckets, seen, agreed)
        if agreed.are_open:
            # Else the check before their graph notices changes, and all ranks agree again.
            self.notice([b for b in self._references.buckets if b.is_at_home])
            self._references.agree()
        return agreed

    def agree(self, seen: Verdict, about: About) -> Verdict:
        """The findings of any rank; changes nothing."""
        own = [seen.is_given, seen.is_outdated, seen.are_open]
        flags = [*seen.stale.values(), *seen.refused.values(), *own]
        *found, is_given, is_outdated, are_open = any_rank(self._collectives, about, flags)
        count = len(seen.stale)
        return Verdict(
            stale=dict(zip(seen.stale, found[:count], strict=True)),
            refused=dict(zip(seen.refused, found[count:], strict=True)),
            is_given=is_given,
            is_outdated=is_outdated,
            are_open=are_open,
        )

    def apply(self, buckets: Sequence[BoundBucket], seen: Verdict, agreed: Verdict) -> None:
        """Give outdated copies another generation, and keep buckets whole if all ranks want that."""
        for bucket in buckets:
            if agreed.stale[bucket.id] and not seen.stale[bucket.id]:
                # Another rank's shard changed: the copy here is as outdated as there.
                self.values_changed(bucket.keys)
        for bucket in buckets:
            if bucket.id in agreed.refused:
                is_agreed = not agreed.refused[bucket.id]
                bucket.cache.agree_in_full(bucket.placement.tier, bucket.home, agreed=is_agreed)

    # --- what has changed ---------------------------------------------------------------------------------

    def notice(self, buckets: Sequence[BoundBucket]) -> None:
        """Give a new generation to parameters of these buckets that may have changed since the last call.

        Buckets that every rank has whole are skipped, as they are never gathered again.  Autograd catches all
        writes to their parameters but the optimizer's, and an optimizer's step changes generations.
        """
        self.notice_parameters(
            dict.fromkeys(k for b in buckets if b.bucket.ranks > 1 for k in b.keys)
        )

    def notice_parameters(self, keys: Iterable[str]) -> None:
        """Give a new generation to those of these parameters that may have changed since the last call."""
        if found := self._seals.changed({key: self._records[key].parameter() for key in keys}):
            self.values_changed(found)
            for key in found:
                self._records[key].peek()  # raises if it was replaced by no home shard

    def values_changed(self, keys: Iterable[str] | None = None) -> None:
        """Note that the values of these parameters, or of all without `keys`, have changed."""
        self.generations.change(self._records if keys is None else keys)

    def values_arrived(self, keys: Sequence[str], buffers: Iterable[str] = ()) -> None:
        """Note that these parameters (by key) and buffers (by name) were written as a whole."""
        self._unset.arrived(keys, buffers)
        self.values_changed(keys)


def _seen(
    buckets: Sequence[BoundBucket], *, is_given: bool, is_outdated: bool, are_open: bool
) -> Verdict:
    """This rank's findings on these buckets."""
    of = [b for b in buckets if b.bucket.strategy.may_keep_full and b.bucket.ranks_per_node > 1]
    return Verdict(
        stale={b.id: b.cache.generation != b.generation for b in buckets},
        refused={b.id: not b.cache.wants_in_full(b.placement.tier) for b in of},
        is_given=is_given,
        is_outdated=is_outdated,
        are_open=are_open,
    )


class Seals:
    """The seals that a model has put on its parameters, by key (`seals`, [Note: seals])."""

    def __init__(self) -> None:
        self._own: dict[str, Seal] = {}

    def changed(self, parameters: Mapping[str, Tensor]) -> list[str]:
        """The keys of the parameters that may have other values than at the last call.

        All are sealed, so that the next call knows which nobody has touched.  A parameter counts as changed
        if it is new here, if it cannot be sealed, or if its seal is not the seal put on here under its key:
        it was exchanged, or another model seals it, too.  Waits for the device only for parameters whose
        memory others could reach.
        """
        parameters = {key: p for key, p in parameters.items() if not self._is_untouched(key, p)}
        if not parameters:
            return []
        keys = [key for key, p in parameters.items() if not isinstance(p, HomeShard)]
        for key in keys:
            self._own.pop(key, None)  # the home shard counts as changed when it is back
        touched = {key: p for key, p in parameters.items() if isinstance(p, HomeShard)}
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

    def _is_untouched(self, key: str, parameter: Tensor) -> bool:
        own = self._own.get(key)
        if own is None or not isinstance(parameter, HomeShard):
            return False
        return parameter.seal is own and own.is_intact(parameter.held)

    def _has(self, key: str, parameter: HomeShard) -> bool:
        return parameter.seal is not None and parameter.seal is self._own.get(key)


def differing(tensors: Sequence[HomeTensor]) -> list[bool]:
    """For each tensor with a broken seal, whether its values differ from those it was sealed with."""
    if not tensors:
        return []
    then = [t.seal.mark for t in tensors if t.seal is not None and t.seal.mark is not None]
    assert len(then) == len(tensors), "seals that are intact have no marks"
    now = fingerprints([[t.present()] for t in tensors])
    marks = torch.stack([mark.to(now.device) for mark in then])
    return [bool(differs) for differs in read(now != marks)]
