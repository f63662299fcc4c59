"""Let ranks agree on which copies differences can be taken from, and on their codes.

[Note: references] A bucket whose format is `delta` is gathered between nodes as differences from the copy
that the last gather left on every rank of the group.  Before the first forward after parameters have changed,
all ranks agree for all such buckets on

    the number of the copy       the same on every rank, else values are sent
    the values in each stage     at least any rank's: messages have one size, and all fit (`difference`)

This is the one time in a step that the Python thread waits for the device.  The agreement serves one gather
of each bucket, whoever starts it: a graph, a refresh, or the program before (`seams`).  If parameters change
before that, the rank where they do notices it at the check before the gather, and all ranks agree again.
What started early is dropped then: it has the generation of the agreement, which is no longer the bucket's.

Each message has a checksum of the new values.  If a copy is not what was sent, all ranks learn it in the next
agreement, when weights have changed again, and raise an error.

After an error in a program no differences are taken from the copies that there are: on one rank, they may
lack what others have stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from fcdp_compile.errors import FcdpError
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.bucket_cache import Agreed
from fcdp_compile.runtime.buckets.model_buckets import ModelBuckets
from fcdp_compile.runtime.collectives.agreement import Question
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.collectives.difference import STAGES_COUNTED, Code, counts
from fcdp_compile.runtime.lanes.reads import read
from fcdp_compile.runtime.parameters.record import Generations


class References:
    """The agreements on differences of one model's buckets."""

    def __init__(
        self, buckets: ModelBuckets, generations: Generations, collectives: Collectives
    ) -> None:
        self._buckets = buckets
        self._generations = generations
        self._collectives = collectives
        self._agreed_at = 0  # the time of `generations`
        self._has_failed = False

    def fail(self) -> None:
        """Note that a program failed, perhaps on this rank alone."""
        self._has_failed = True

    @property
    def are_open(self) -> bool:
        """Whether an agreement is due: parameters have changed since the last, or a program failed."""
        changed = self._agreed_at != self._generations.now
        return (changed or self._has_failed) and bool(self.buckets)

    @property
    def buckets(self) -> list[BoundBucket]:
        """The buckets to agree on."""
        return self._buckets.differing()

    @torch.no_grad()
    def agree(self) -> None:
        """Agree on how each bucket is sent next; every rank must call it.

        Raises: FcdpError on every rank if the last differences were added to other values than they are of.
        """
        self._agreed_at = self._generations.now
        has_failed, self._has_failed = self._has_failed, False
        buckets = self.buckets
        for bucket in buckets:
            bucket.cache.agreed = None
        digest = hashlib.sha256(repr([b.id for b in buckets]).encode()).hexdigest()[:16]
        act, what = f"sends differences of buckets {digest}", "the agreement on differences"
        found = Question(self._collectives, act, [has_failed], what).answer()
        if found is None or any(found):
            for bucket in buckets:
                bucket.cache.unnumber()
            return
        if not buckets:
            return
        numbers = [0 if not b.is_at_home else b.cache.number for b in buckets]
        changes = _found(buckets, numbers)
        words = [
            word
            for number, own in zip(numbers, changes, strict=True)
            for word in (number, -number, *own)
        ]
        told = self._collectives.tell(words, what, torch.maximum).finish()
        size = len(words) // len(buckets)
        for i, bucket in enumerate(buckets):
            most, least, is_wrong, *count = told[i * size : (i + 1) * size]
            if is_wrong:
                self._refuse(buckets, bucket)
            cache = bucket.cache
            cache.stored = max(cache.stored, most)  # the next copies have one number again
            sizes = bucket.bucket.sizes() or (bucket.bucket.slot_elements,)
            code = Code((max(sizes), *count))
            if 0 < most == -least and code.bytes < bucket.bucket.wire_bytes:
                cache.agreed = Agreed(code, bucket.generation, most)

    def _refuse(self, buckets: Sequence[BoundBucket], wrong: BoundBucket) -> None:
        for bucket in buckets:
            bucket.cache.agreed = None
            bucket.cache.unnumber()
        raise FcdpError(
            f"the copy of bucket {wrong.id} ({wrong.records[0].spec.name}, …) on some rank is not what was "
            "sent, so the last step computed with wrong weights; go back to a checkpoint, and look for "
            "damaged memory, or report a bug in fcdp"
        )


def _found(buckets: Sequence[BoundBucket], numbers: Sequence[int]) -> list[list[int]]:
    """For each bucket with a number, whether its copy is wrong, and how many of this rank's values differ."""
    nothing = [0] * (1 + STAGES_COUNTED)
    found = {}
    for i, (bucket, number) in enumerate(zip(buckets, numbers, strict=True)):
        if number and bucket.cache.generation != bucket.generation:
            old = bucket.cache.own_slot(bucket.home).wait()
            is_wrong, new = bucket.cache.is_wrong, bucket.packed()
            changed = counts(new.to(old.device, non_blocking=True), old)
            wrong = changed.new_zeros(1) if is_wrong is None else is_wrong.to(changed.dtype)
            found[i] = torch.cat([wrong, changed])
    rows = dict(zip(found, read(torch.stack(list(found.values()))) if found else [], strict=True))
    return [rows.get(i, nothing) for i in range(len(buckets))]
