"""The differences of two plans, in a few lines for people.

They cover exactly the fields that ranks must agree on and that `Plan.digest` covers: no line for graph
numbers, compute steps, labels and waits, and at least one line if the digests differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice

from fcdp_compile.plan import Bucket, BucketParam, Kind, Placement, Plan, Schedule, Step

_BUCKETS_SHOWN = 5
_NAMES_SHOWN = 3
_STEPS_SHOWN = 3

_BUCKET_FIELDS = (
    "strategy",
    "dtype",
    "itemsize",
    "reduce_dtype",
    "reduce_itemsize",
    "slot_bytes",
    "frozen",
    "wire",
    "reduce_wire",
    "host_format",
    "algorithm",
)


def diff(a: Plan, b: Plan, *, names: tuple[str, str] = ("first", "second")) -> list[str]:
    """Say how two plans differ; no line if ranks that have them can work together.

    names: of the two plans in the lines, such as ("rank 0", "rank 3").
    """
    lines = [
        _values(field, getattr(a, field), getattr(b, field), names)
        for field in ("strategy", "nodes", "ranks_per_node")
        if getattr(a, field) != getattr(b, field)
    ]
    lines += _diff_items("bucket", [x.id for x in a.buckets], [x.id for x in b.buckets], names)
    lines += _diff_buckets(a, b, names)
    lines += _diff_items("refresh of bucket", a.refresh, b.refresh, names)
    lines += _diff_schedules(a, b, names)
    return lines


def _diff_buckets(a: Plan, b: Plan, names: tuple[str, str]) -> Iterator[str]:
    theirs = {bucket.id: bucket for bucket in b.buckets}
    common = [(x, theirs[x.id]) for x in a.buckets if x.id in theirs]
    differing = (
        lines
        for x, y in common
        if (
            lines := [
                *_diff_placement(a.placement(x.id), b.placement(x.id), names),
                *_diff_bucket(x, y, names),
            ]
        )
    )
    for lines in islice(differing, _BUCKETS_SHOWN):
        yield from lines
    if more := sum(1 for _ in differing):
        yield f"... and {more} more buckets differ"


def _diff_placement(x: Placement, y: Placement, names: tuple[str, str]) -> Iterator[str]:
    if x.is_cached is not y.is_cached:
        mine, other = (f"{p.tier.value} ({p.why})" for p in (x, y))
        yield _values(f"bucket {x.bucket} tier", mine, other, names)
    if x.accumulates is not y.accumulates:
        mine, other = (p.gradient_tier.value for p in (x, y))
        yield _values(f"bucket {x.bucket} gradient_tier", mine, other, names)


def _diff_bucket(x: Bucket, y: Bucket, names: tuple[str, str]) -> Iterator[str]:
    for field in _BUCKET_FIELDS:
        if getattr(x, field) != getattr(y, field):
            yield _values(f"bucket {x.id} {field}", getattr(x, field), getattr(y, field), names)
    names_x, names_y = [p.name for p in x.params], [p.name for p in y.params]
    yield from _diff_items(f"bucket {x.id} parameter", names_x, names_y, names)
    theirs = {p.name: p for p in y.params}
    changed = [p for p in x.params if p.name in theirs and p != theirs[p.name]]
    for p in changed[:_NAMES_SHOWN]:
        yield _values(f"bucket {x.id} {p.name}", _slot(p), _slot(theirs[p.name]), names)
    if len(changed) > _NAMES_SHOWN:
        yield f"bucket {x.id}: ... and {len(changed) - _NAMES_SHOWN} more parameters differ"


def _diff_schedules(a: Plan, b: Plan, names: tuple[str, str]) -> Iterator[str]:
    of_a, of_b = [_title(s) for s in a.schedules], [_title(s) for s in b.schedules]
    if of_a != of_b:
        yield _values("schedules", ", ".join(of_a) or "none", ", ".join(of_b) or "none", names)
    theirs = {_title(schedule): schedule for schedule in b.schedules}
    for schedule in a.schedules:
        if _title(schedule) in theirs:
            yield from _diff_steps(schedule, theirs[_title(schedule)], names)


def _diff_steps(x: Schedule, y: Schedule, names: tuple[str, str]) -> Iterator[str]:
    """Show the first few pairs of steps that differ, without compute steps."""
    mine = [s for s in x.steps if s.kind is not Kind.COMPUTE]
    other = [s for s in y.steps if s.kind is not Kind.COMPUTE]
    title = _title(x)
    if len(mine) != len(other):
        yield _values(f"{title}: communication steps", len(mine), len(other), names)
    longest = max(len(mine), len(other))
    differing = (i for i in range(longest) if not _is_same(_at(mine, i), _at(other, i)))
    for i in islice(differing, _STEPS_SHOWN):
        yield _values(f"{title}", _describe(_at(mine, i)), _describe(_at(other, i)), names)


def _diff_items(
    what: str, a: Sequence[object], b: Sequence[object], names: tuple[str, str]
) -> Iterator[str]:
    """The items that only one side has, and the first place where the order of common items differs."""
    in_a, in_b = set(a), set(b)
    for here, there, name in ((a, in_b, names[0]), (b, in_a, names[1])):
        extra = [str(item) for item in here if item not in there]
        if extra:
            more = f" and {len(extra) - _NAMES_SHOWN} more" if len(extra) > _NAMES_SHOWN else ""
            yield f"only {name} has {what} {', '.join(extra[:_NAMES_SHOWN])}{more}"
    common = zip((x for x in a if x in in_b), (x for x in b if x in in_a), strict=False)
    moved = next(((x, y) for x, y in common if x != y), None)
    if moved:
        yield f"order of {what}: {names[0]} has {moved[0]} where {names[1]} has {moved[1]}"


def _is_same(x: Step | None, y: Step | None) -> bool:
    if x is None or y is None:
        return x is y
    return x.compared == y.compared


def _at(steps: Sequence[Step], index: int) -> Step | None:
    return steps[index] if index < len(steps) else None


def _describe(step: Step | None) -> str:
    if step is None:
        return "no step"
    return f"step {step.index} {step.kind.value} of bucket {step.bucket}, {step.bytes} bytes"


def _title(schedule: Schedule) -> str:
    return f"{schedule.direction.value} {schedule.variant.value}"


def _slot(param: BucketParam) -> str:
    layout = param.layout
    cut = f"over {layout.nodes} x {layout.ranks_per_node} ranks"
    return f"shape {layout.shape} cut along {layout.dim} {cut}, at element {param.offset}"


def _values(what: str, mine: object, other: object, names: tuple[str, str]) -> str:
    return f"{what}: {names[0]} {_text(mine)}; {names[1]} {_text(other)}"


def _text(value: object) -> str:
    return str(value.value) if isinstance(value, Enum) else str(value)
