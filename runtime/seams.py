"""Start the first transfers of a program while the program before it still computes.

[Note: seams] Programs and backwards follow each other in the same order in nearly every step.  The model
remembers which one followed which.  When a program has started all of its own gathers, the model starts
those with which the next program begins, and this program finds them on their way or done.  So a graph break,
or layers that are compiled one by one, leave less to wait for.

Every rank starts the same transfers at the same place, because all ranks run programs with equal plans in the
same variants, and remember by these (`Event`).  Where another program follows than before, all ranks drop
what they started, and never again start anything there.  The agreement before a forward tells all ranks if on
any rank a value has changed since, an optimizer has stepped or a program has failed: then all of them do the
same (`cut`).  What one rank alone knows never changes what it starts or drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fcdp_compile.plan import Direction, Kind, Variant
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.validity import Validity
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending

Event = tuple[str, Direction, Variant]
"""The run of a program, equal on all ranks: the digest of its plan, and the schedule that it follows."""

Transfer = tuple[Kind, BoundBucket]


@dataclass(frozen=True, slots=True)
class _Started:
    bucket: BoundBucket
    generation: int
    pending: Pending


class Seams:
    """What runs after what, and the transfers that have started for the program that is to run next."""

    def __init__(self, validity: Validity, counters: Counters, lanes: Lanes) -> None:
        self._validity = validity
        self._counters = counters
        self._lanes = lanes
        self._now: Event | None = None
        self._step = 0  # in which it began
        self._is_cut = False  # all ranks agreed that what follows `_now` must not start early
        self._has_failed = False  # a program, perhaps on this rank only
        # None: not always the same.
        self._after: dict[Event, Event | None] = {}
        self._leading: dict[Event, Sequence[Transfer]] = {}
        self._next: Event | None = None
        self._early: dict[tuple[Kind, int], _Started] = {}  # by the bucket's number

    # --- the order ----------------------------------------------------------------------------------------

    def begin(self, event: Event, leading: Sequence[Transfer]) -> None:
        """Note that a program begins; drop the transfers that started for another one.

        leading: the transfers with which the program begins (`plan.whole_step.leading`).
        """
        if self._now is not None:
            seen = None if self._is_cut else event
            if self._after.setdefault(self._now, seen) != seen:
                self._after[self._now] = None
        if self._next != event:
            self.drop()
        self._is_cut = False
        self._now, self._step = event, self._counters.steps
        self._leading[event] = leading

    def start_next(self, room_bytes: int | None) -> None:
        """Start the transfers of the program that is to run next.

        room_bytes: device memory for their results; None without a limit.
        """
        assert self._now is not None, "a program runs"
        self._next = self._after.get(self._now)
        # The memory of one plan's forward and backward is predicted without.
        if self._next is None or self._next[0] == self._now[0]:
            return
        leading = self._leading[self._next]
        if not all(bucket.lives for _, bucket in leading):
            return
        sizes = (
            b.bucket.full_bytes if kind is Kind.INTRA_ALL_GATHER else b.bucket.node_bytes
            for kind, b in leading
        )
        if room_bytes is not None and sum(sizes) > room_bytes:
            return
        for kind, bucket in leading:
            self._start(kind, bucket)

    # --- the transfers ------------------------------------------------------------------------------------

    def living(self) -> list[BoundBucket]:
        """The buckets whose transfers have started and that the model still has."""
        started = {s.bucket.id: s.bucket for s in self._early.values()}.values()
        return [bucket for bucket in started if bucket.lives]

    def is_outdated(self) -> bool:
        """Whether what has started on this rank may be of no use to the forward that is about to begin.

        Changes of these buckets' parameters must have been noticed.
        """
        has_failed, self._has_failed = self._has_failed, False
        if has_failed or self._step != self._counters.steps:
            return True
        return any(
            s.generation != s.bucket.generation or not s.bucket.lives for s in self._early.values()
        )

    def take(self, kind: Kind, bucket: BoundBucket, generation: int | None) -> Pending | None:
        """The transfer, if it has started.

        generation: of the copy that a backward needs; None if all ranks compare, or have compared, the values
        in another way.
        """
        started = self._early.pop((kind, bucket.id), None)
        if started is None or generation in (None, started.generation):
            return None if started is None else started.pending
        self._lanes.settle()  # as in `drop`
        return None

    def cut(self) -> None:
        """As all ranks agreed: drop what has started, and never again start anything here."""
        self._is_cut = True
        self.drop()

    def fail(self) -> None:
        """Note that a program failed, perhaps on this rank alone: the next forward tells all ranks."""
        self._has_failed = True

    def drop(self) -> None:
        """Drop the transfers that have started."""
        if self._early:
            self._early.clear()
            self._lanes.settle()  # nothing will wait for what they read, which may be written to next

    def _start(self, kind: Kind, bucket: BoundBucket) -> None:
        if kind is Kind.LOAD:
            generation = bucket.cache.generation
            if generation is None:
                return
            pending = bucket.load(generation)
        elif kind is Kind.INTER_ALL_GATHER:
            self._validity.notice([bucket])
            # As all ranks do, whatever this rank has just noticed; after a change the result is outdated.
            agreed = bucket.cache.agreed
            generation = bucket.generation if agreed is None else agreed.generation
            pending = bucket.gather(kind, bucket.packed())
        else:
            sources = (Kind.LOAD, bucket.id), (Kind.INTER_ALL_GATHER, bucket.id)
            found = next((self._early[s] for s in sources if s in self._early), None)
            if found is None or found.pending.is_full:
                return
            generation = found.generation
            pending = bucket.gather(kind, found.pending)
        self._early[kind, bucket.id] = _Started(bucket, generation, pending)
