"""The buckets of one model, bound to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fcdp_compile.buckets import exact_bucket, wanted_gradient_tier, wanted_tier
from fcdp_compile.plan import Bucket, Placement, Plan
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.bucket_cache import BucketCache
from fcdp_compile.runtime.buckets.transport import Transport
from fcdp_compile.runtime.parameters.record import Generations, Records
from fcdp_compile.strategy.formats import Format


class ModelBuckets:
    """The buckets of a model's plans by the keys of their parameters, and a bucket for each key alone."""

    def __init__(self, records: Records, generations: Generations, transport: Transport) -> None:
        self._records = records
        self._generations = generations
        self.transport = transport
        self._caches: dict[int, BucketCache] = {}  # by the number of a planned bucket
        self._planned: dict[str, dict[int, BoundBucket]] = {}  # as the latest plan binds them
        self._differing: dict[int, BoundBucket] = {}  # those whose format is `delta`
        self._run: dict[int, BoundBucket] = {}  # as the plan that ran last with each binds them
        self._alone: dict[tuple[str, torch.dtype, bool], BoundBucket] = {}

    def bind(self, plan: Plan) -> dict[int, BoundBucket]:
        """The buckets of a plan, by number."""
        bound = {}
        for bucket, placement in plan.placed:
            if bucket.id not in self._caches:
                self._caches[bucket.id] = BucketCache(bucket, self.transport)
            made = bound[bucket.id] = self._bind(bucket, placement, self._caches[bucket.id])
            if bucket.wire is Format.DELTA:
                self._differing[bucket.id] = made
            for key in made.keys:
                self._planned.setdefault(key, {})[bucket.id] = made
        return bound

    def note_run(self, buckets: Mapping[int, BoundBucket]) -> None:
        """Note that a plan with these buckets runs: reads outside of graphs keep them where it does."""
        self._run.update(buckets)

    def alone(self, key: str, dtype: torch.dtype, *, is_frozen: bool) -> BoundBucket:
        """The bucket of one parameter that is used outside of graphs, gathered in a dtype."""
        if (key, dtype, is_frozen) not in self._alone:
            spec = replace(self._records[key].spec, gather_dtype=dtype)
            why = "used outside of graphs"
            bucket = exact_bucket(-1, [spec], is_frozen=is_frozen, why=why)
            placement = Placement(
                bucket=-1,
                tier=wanted_tier(bucket.strategy),
                gradient_tier=wanted_gradient_tier(spec.strategy),
                why=why,
            )
            cache = BucketCache(bucket, self.transport)
            self._alone[key, dtype, is_frozen] = self._bind(bucket, placement, cache)
        return self._alone[key, dtype, is_frozen]

    def _bind(self, bucket: Bucket, placement: Placement, cache: BucketCache) -> BoundBucket:
        records = self._records.of(bucket)
        return BoundBucket(bucket, placement, records, cache, self._generations, self.transport)

    def of(self, key: str) -> list[BoundBucket]:
        """A parameter's planned buckets whose parameters are all home shards now, oldest first.

        Others have a parameter that the model no longer has, or that is whole for a while.
        """
        planned = self._planned.get(key, {})
        return [b for i, latest in planned.items() if (b := self._run.get(i, latest)).is_at_home]

    def release_rivals(self, bucket: BoundBucket) -> None:
        """Release copies of buckets that this bucket replaces because parameters were frozen or unfrozen."""
        for key in bucket.keys:
            for other in self._planned.get(key, {}).values():
                if other.bucket.frozen != bucket.bucket.frozen:
                    other.give_up()

    def differing(self) -> list[BoundBucket]:
        """The buckets of which differences may be sent: all ranks have stored copies of them."""
        return [bucket for _, bucket in sorted(self._differing.items()) if bucket.cache.stored]

    def caches(self) -> list[BucketCache]:
        """The caches of all buckets."""
        return [*self._caches.values(), *(bucket.cache for bucket in self._alone.values())]
