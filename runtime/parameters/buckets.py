"""The buckets that the graphs of one model made."""

from __future__ import annotations

from collections.abc import Iterator

from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.plan import Bucket, Plan
from fcdp_compile.runtime.parameters.record import Records


class GraphBuckets:
    """The buckets of a model's plans, by the keys of their parameters."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._buckets: dict[str, list[Bucket]] = {}

    def add(self, plan: Plan) -> None:
        """Note the buckets of a plan."""
        for bucket in plan.buckets:
            for key in self._records.keys_of(bucket):
                known = self._buckets.setdefault(key, [])
                if bucket not in known:
                    known.append(bucket)

    def of(self, key: str) -> list[Bucket]:
        """A parameter's buckets whose parameters are all home shards now, oldest first.

        Others have a parameter that the model no longer has, or that is whole for a while.
        """
        return [b for b in self._buckets.get(key, ()) if self._is_at_home(b)]

    def _is_at_home(self, bucket: Bucket) -> bool:
        places = [record.places() for record in self._records.of(bucket)]
        return all(found and isinstance(found[0], HomeShard) for found in places)

    def rivals(self, bucket: Bucket) -> Iterator[Bucket]:
        """The buckets that this bucket replaces because parameters were frozen or unfrozen."""
        for key in self._records.keys_of(bucket):
            yield from (b for b in self._buckets.get(key, ()) if b.frozen != bucket.frozen)
