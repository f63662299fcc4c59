"""The plans of the graphs of one training step as one plan, and what crosses the seams between graphs.

A program starts the first transfers of the next program (`runtime.seams`), and a backward program leaves
its drain to the next one (`runtime.drains`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fcdp_compile.plan.kinds import FETCHES, REDUCING, Kind
from fcdp_compile.plan.records import (
    Bucket,
    Direction,
    Placement,
    Plan,
    Schedule,
    Step,
    Variant,
)

_REDUCED = REDUCING | {Kind.COLLECT, Kind.STORE_GRADS}
_ENDING = frozenset({Kind.WAIT, Kind.FREE, Kind.COMPUTE, None})


def leading(schedule: Schedule, buckets: Mapping[int, Bucket]) -> list[Step]:
    """The transfers with which a schedule begins and that may start before its program.

    A copy that lives until the backward may be loaded once only.  Home shards in host memory are loaded by
    the program itself.
    """
    found: dict[tuple[Kind, int], Step] = {}
    on_host = {step.bucket for step in schedule.steps if step.kind is Kind.LOAD_HOME}
    for step in schedule.steps:
        if step.kind is Kind.WAIT:
            break
        if step.bucket is None:
            continue
        if step.kind is Kind.LOAD:
            is_possible = buckets[step.bucket].strategy.is_resident
        elif step.kind is Kind.INTER_ALL_GATHER:
            is_possible = step.bucket not in on_host
        else:
            sources = (Kind.LOAD, step.bucket), (Kind.INTER_ALL_GATHER, step.bucket)
            is_possible = step.kind is Kind.INTRA_ALL_GATHER and any(s in found for s in sources)
        if is_possible:
            found[step.kind, step.bucket] = step
    return list(found.values())


def drain_begins(kinds: Sequence[Kind | None], inputs: Sequence[Collection[int]]) -> int:
    """Where the drain begins: from this position on, steps only wait for reductions or use their results.

    kinds: of steps, None for work that is no step.  inputs: for each step, the positions of the steps whose
    results it needs.
    """
    late: set[int] = set()
    for at, (kind, needed) in enumerate(zip(kinds, inputs, strict=True)):
        waits = kind is Kind.WAIT and any(kinds[i] in _REDUCED for i in needed)
        if waits or not late.isdisjoint(needed):
            late.add(at)
    first = len(kinds)
    while first - 1 in late and kinds[first - 1] in _ENDING:
        first -= 1
    return first


def of_one_step(plans: Sequence[Plan]) -> list[Plan]:
    """The plans that can follow each other in one step: each has parameters that no earlier plan has.

    Other plans are of graphs that were compiled again, for other shapes or modes.
    """
    found: list[Plan] = []
    known: set[str] = set()
    for plan in plans:
        names = {p.name for b in plan.buckets for p in b.params}
        if plan.schedules and not names <= known:
            found.append(plan)
            known |= names
    return found


def whole_step(plans: Sequence[Plan]) -> Plan:
    """One plan with the steps of all: forwards in the order of the plans, backwards in reverse order.

    plans: at least one, in the order of their forwards.  A schedule that a plan lacks is replaced by the
    schedule that runs instead: cold.
    """
    first, *more = plans = _forwards(plans)
    if not more:
        return first
    placed = {b.id: (b, at) for plan in plans for b, at in plan.placed}
    buckets = {number: bucket for number, (bucket, _) in placed.items()}
    joined = tuple(_schedules(plans, buckets))
    peaks = [plan.peak_bytes for plan in plans if plan.peak_bytes is not None]
    peaks += [size for schedule in joined for size in schedule.memory_bytes]
    limits = [p.memory_limit_bytes for p in plans if p.memory_limit_bytes is not None]
    placements: tuple[Placement, ...] = tuple(at for _, at in placed.values())
    return replace(
        first,
        strategy=", ".join(dict.fromkeys(plan.strategy for plan in plans)),
        buckets=tuple(buckets.values()),
        placements=placements,
        refresh=tuple(dict.fromkeys(chain.from_iterable(plan.refresh for plan in plans))),
        schedules=joined,
        peak_bytes=max(peaks, default=None),
        memory_limit_bytes=min(limits, default=None),
    )


def _forwards(plans: Sequence[Plan]) -> list[Plan]:
    """The plans; a graph of a training step in which nothing is trained counts as a forward."""

    def as_forward(schedule: Schedule) -> Schedule:
        is_inference = schedule.direction is Direction.INFERENCE
        return replace(schedule, direction=Direction.FORWARD) if is_inference else schedule

    directions = [{s.direction for s in plan.schedules} for plan in plans]
    if not any(Direction.FORWARD in found for found in directions):
        return list(plans)
    return [
        plan
        if Direction.FORWARD in found
        else replace(plan, schedules=tuple(map(as_forward, plan.schedules)))
        for plan, found in zip(plans, directions, strict=True)
    ]


def _schedules(plans: Sequence[Plan], buckets: Mapping[int, Bucket]) -> Iterator[Schedule]:
    keys = dict.fromkeys((s.direction, s.variant) for plan in plans for s in plan.schedules)
    for direction, variant in keys:
        parts = [found for plan in plans if (found := part_of(plan, direction, variant))]
        if direction is Direction.BACKWARD:
            parts.reverse()
        yield _Joining(parts, buckets).schedule(variant)


def part_of(plan: Plan, direction: Direction, variant: Variant) -> Schedule | None:
    """The schedule of a variant, or the cold one, or the only one."""
    found = {s.variant: s for s in plan.schedules if s.direction is direction}
    return found.get(variant) or found.get(Variant.COLD) or next(iter(found.values()), None)


@dataclass(frozen=True, slots=True)
class _Placed:
    """A step in its new place: its part, its position there, and bytes that other parts have in use then."""

    part: int
    at: int
    beside_bytes: int


class _Joining:
    """Joins the schedules of one direction, which run one after the other, into one schedule.

    Each part keeps its order, with two exceptions.  The transfers that the next part begins with move to
    before it: they start right after the last fetch of the part before.  The drain of a part, in which its
    last reductions end, moves behind the body of the next part.
    """

    def __init__(self, parts: Sequence[Schedule], buckets: Mapping[int, Bucket]) -> None:
        self._parts = parts
        self._buckets = buckets
        # The positions of the steps that cross the seam before a part, and where its drain begins.
        self._early = [
            [s.index for s in leading(p, buckets)] if i else [] for i, p in enumerate(parts)
        ]
        self._drains = [
            drain_begins([s.kind for s in p.steps], [s.waits for s in p.steps])
            if p.direction is Direction.BACKWARD
            else len(p.steps)
            for p in parts
        ]

    def schedule(self, variant: Variant) -> Schedule:
        order = list(self._order())
        index = {(placed.part, placed.at): i for i, placed in enumerate(order)}
        steps = [
            replace(
                step := self._parts[placed.part].steps[placed.at],
                index=i,
                waits=tuple(index[placed.part, w] for w in self._waits(placed.part, step)),
            )
            for i, placed in enumerate(order)
        ]
        is_predicted = all(len(p.memory_bytes) == len(p.steps) for p in self._parts)
        return Schedule(
            direction=self._parts[0].direction,
            variant=variant,
            steps=tuple(steps),
            in_flight_bytes=max(part.in_flight_bytes for part in self._parts)
            + max((placed.beside_bytes for placed in order), default=0),
            memory_bytes=tuple(self._memory(placed) for placed in order) if is_predicted else (),
        )

    def _waits(self, number: int, step: Step) -> list[int]:
        """The steps that a step waits for; a transfer that starts early packs its home shard itself."""
        early = self._early[number]
        return [w for w in step.waits if step.index not in early or w in early]

    def _memory(self, placed: _Placed) -> int:
        return self._parts[placed.part].memory_bytes[placed.at] + placed.beside_bytes

    def _order(self) -> Iterator[_Placed]:
        """All steps in their new order."""
        last = len(self._parts) - 1
        draining = 0  # bytes of the last part's gradients that are still reduced
        for number, part in enumerate(self._parts):
            early = set(self._early[number])
            body = [at for at in range(self._drains[number]) if at not in early]
            # Without a fetch, the next part's transfers start at once.
            fetches = [at for at in body if part.steps[at].kind in FETCHES]
            started = 0
            if not fetches and number < last:
                started = self._early_bytes(number + 1)
                yield from self._crossing(number + 1, draining)
            for at in body:
                yield _Placed(number, at, draining + started)
                if fetches and at == fetches[-1] and number < last:
                    started = self._early_bytes(number + 1)
                    yield from self._crossing(number + 1, draining)
            if number:
                yield from self._drain(number - 1, started)
            draining = self._drain_bytes(number)
        yield from self._drain(last, 0)

    def _crossing(self, number: int, draining: int) -> Iterator[_Placed]:
        """The transfers of a part that start before it."""
        for at in self._early[number]:
            yield _Placed(number, at, draining)

    def _drain(self, number: int, started: int) -> Iterator[_Placed]:
        for at in range(self._drains[number], len(self._parts[number].steps)):
            yield _Placed(number, at, started)

    def _early_bytes(self, number: int) -> int:
        steps = [self._parts[number].steps[at] for at in self._early[number]]
        found = [(s.kind, self._buckets[s.bucket]) for s in steps if s.bucket is not None]
        return sum(b.full_bytes if k is Kind.INTRA_ALL_GATHER else b.node_bytes for k, b in found)

    def _drain_bytes(self, number: int) -> int:
        """Bytes of the gradients whose reductions a part's drain waits for."""
        steps = self._parts[number].steps
        waited = {steps[w].bucket for s in steps[self._drains[number] :] for w in s.waits}
        found = [self._buckets[i] for i in waited if i is not None]
        return sum(b.slot_elements * b.slots * b.reduce_itemsize for b in found)
