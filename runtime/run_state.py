"""What one run of a program knows beside its values."""

from __future__ import annotations

from fcdp_compile.errors import StaleParameterError
from fcdp_compile.plan import Bucket, Kind
from fcdp_compile.runtime.collectives.agreement import Question
from fcdp_compile.runtime.lanes.pending import Pending
from fcdp_compile.runtime.model import ShardedModel


class RunState:
    """The state of one run of a program, which is in the last place of its values.

    accumulates: for a forward, whether its backward will accumulate gradients.
    given: the mark of the values that it was given if they are not the model's own, else 0.
    generations: for a backward, the generations that its forward stamped, by bucket id.
    changed: for a backward that gathers again, the buckets that changed on this rank since its forward, and
    the question whether buckets changed on any rank.
    """

    __slots__ = ("accumulates", "changed", "generations", "given", "model")

    def __init__(self, model: ShardedModel, *, accumulates: bool, given: int) -> None:
        self.model = model
        self.accumulates = accumulates
        self.given = given
        self.generations: dict[int, int] = {}
        self.changed: tuple[list[Bucket], Question] | None = None

    def generation(self, bucket: Bucket) -> int:
        """The stamped generation in a backward, the current one in a forward."""
        stamped = self.generations.get(bucket.id)
        return self.model.validity.generation(bucket) if stamped is None else stamped

    def started(self, kind: Kind, bucket: Bucket) -> Pending | None:
        """The transfer, if it has started before the program (`seams`)."""
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
            f"bucket {changed[0].id} ({changed[0].params[0].name}, …)"
            if changed
            else "another rank"
        )
        raise StaleParameterError(
            f"parameters of {where} changed between the forward and its backward; run the backward before "
            "the optimizer steps or anything else writes to them"
        )
