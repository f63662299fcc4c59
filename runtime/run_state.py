"""What one run of a program knows beside its values."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fcdp_compile.errors import StaleParameterError
from fcdp_compile.plan import Kind
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.collectives.agreement import Question
from fcdp_compile.runtime.lanes.pending import Pending, passed_on
from fcdp_compile.runtime.model import ShardedModel


class RunState:
    """The state of one run of a program, which is in the last place of its values.

    accumulates: for a forward, whether its backward will accumulate gradients.
    given: the mark of the values that it was given if they are not the model's own, else 0.
    buckets: those of the plan that runs, by number.
    generations: for a backward, the generations that its forward stamped, by bucket id.
    changed: for a backward that gathers again, the buckets that changed on this rank since its forward, and
    the question whether buckets changed on any rank.
    """

    __slots__ = ("accumulates", "buckets", "changed", "generations", "given", "model")

    def __init__(
        self,
        model: ShardedModel,
        buckets: Mapping[int, BoundBucket],
        *,
        accumulates: bool,
        given: int,
    ) -> None:
        self.model = model
        self.buckets = buckets
        self.accumulates = accumulates
        self.given = given
        self.generations: dict[int, int] = {}
        self.changed: tuple[list[BoundBucket], Question] | None = None

    def generation(self, bucket: BoundBucket) -> int:
        """The stamped generation in a backward, the current one in a forward."""
        stamped = self.generations.get(bucket.id)
        return bucket.generation if stamped is None else stamped

    def gather(self, kind: Kind, bucket: BoundBucket, *parts: Tensor | Pending) -> Pending:
        """Start one step of a gather, unless it has started before the program (`seams`)."""
        part = parts[0]
        if kind is Kind.INTRA_ALL_GATHER and isinstance(part, Pending) and part.is_full:
            self.model.counters.add(kind, 0)
            return passed_on(part)
        result = self._started(kind, bucket) or bucket.gather(kind, *parts)
        if kind in (Kind.INTRA_ALL_GATHER, Kind.INTRA_REST_ALL_GATHER):
            bucket.cache.keep_full(result, self.generation(bucket))
        return result

    def load(self, bucket: BoundBucket) -> Pending:
        """Start to load the bucket's copy, unless that has started before the program."""
        return self._started(Kind.LOAD, bucket) or bucket.load(self.generation(bucket))

    def _started(self, kind: Kind, bucket: BoundBucket) -> Pending | None:
        return self.model.seams.take(kind, bucket, self.generations.get(bucket.id))

    def refuse_changed(self) -> None:
        """At the end of a backward, raise if it may have gathered other values than its forward.

        Raises: StaleParameterError on every rank.
        """
        if self.changed is None:
            return
        changed, question = self.changed
        if not any(question.agreed()):
            return
        where = (
            f"bucket {changed[0].id} ({changed[0].bucket.params[0].name}, …)"
            if changed
            else "another rank"
        )
        raise StaleParameterError(
            f"parameters of {where} changed between the forward and its backward; run the backward before "
            "the optimizer steps or anything else writes to them"
        )
