"""A plan as tables for a terminal: buckets, and the ordered steps of each schedule."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from fcdp_compile.fold import fold_numbers, fold_params
from fcdp_compile.json_records import one_line
from fcdp_compile.plan import Bucket, Lane, Plan, Schedule, Step

_BUCKET_HEADERS = (
    "bucket",
    "parameters",
    "count",
    "slot MiB",
    "node MiB",
    "full MiB",
    "dtype",
    "reduce dtype",
    "frozen",
    "strategy",
    "tier",
    "why",
)
_LINKS = (Lane.INTER, Lane.INTRA, Lane.H2D, Lane.D2H)
_MIB = 2**20


def format_plan(name: str, plan: Plan) -> str:
    """The buckets of a plan, then the steps of each schedule and what they move over each link."""
    header = (
        f"{one_line(name)}: "
        f"graph {plan.graph}, strategy {one_line(plan.strategy)}, "
        f"{plan.nodes} x {plan.ranks_per_node} ranks (N x g), digest {plan.digest()[:12]}"
    )
    refresh = fold_numbers(sorted(plan.refresh)) or "none"
    sections = [header, _format_buckets(plan), f"refresh before a forward: {refresh}"]
    directions = [schedule.direction for schedule in plan.schedules]
    sections += [
        _format_schedule(schedule, has_variants=directions.count(schedule.direction) > 1)
        for schedule in plan.schedules
    ]
    return "\n\n".join(sections)


def _format_buckets(plan: Plan) -> str:
    rows = [_bucket_row(bucket) for bucket in plan.buckets]
    count = sum(len(bucket.params) for bucket in plan.buckets)
    rows.append(("total", "", str(count), *_sizes(*plan.buckets), "", "", "", "", "", ""))
    align = ("right", "left", "right", "right", "right", "right", *["left"] * 6)
    return _table(_BUCKET_HEADERS, rows, align)


def _bucket_row(bucket: Bucket) -> tuple[str, ...]:
    return (
        str(bucket.id),
        "\n".join(one_line(line) for line in fold_params(bucket.params)),
        str(len(bucket.params)),
        *_sizes(bucket),
        bucket.dtype,
        bucket.reduce_dtype,
        "yes" if bucket.frozen else "no",
        one_line(bucket.strategy.name),
        bucket.tier.value,
        one_line(bucket.why),
    )


def _sizes(*buckets: Bucket) -> tuple[str, ...]:
    """Slot, node shard and full parameters in MiB, of all together."""
    sizes = [(b.slot_bytes, b.node_bytes, b.full_bytes) for b in buckets] or [(0, 0, 0)]
    return tuple(_mib(sum(column)) for column in zip(*sizes, strict=True))


def _format_schedule(schedule: Schedule, *, has_variants: bool) -> str:
    title = schedule.direction.value + (f" {schedule.variant.value}" if has_variants else "")
    headers = ("step", "kind", "lane", "bucket", "bytes", "waits for", "label")
    rows = [_step_row(step) for step in schedule.steps]
    moved = sum(step.bytes for step in schedule.steps)
    rows.append(("total", f"{len(schedule.steps)} steps", "", "", str(moved), "", ""))
    align = ("right", "left", "left", "right", "right", "left", "left")
    return f"{title}\n\n{_table(headers, rows, align)}\n\n{_format_links(schedule)}"


def _step_row(step: Step) -> tuple[str, ...]:
    return (
        str(step.index),
        step.kind.value,
        step.lane.value,
        "" if step.bucket is None else str(step.bucket),
        str(step.bytes),
        fold_numbers(sorted(step.waits)),
        one_line(step.label),
    )


def _format_links(schedule: Schedule) -> str:
    rows = []
    for lane in _LINKS:
        steps = [step for step in schedule.steps if step.lane is lane]
        moved = sum(step.bytes for step in steps)
        rows.append((lane.value, str(len(steps)), str(moved), _mib(moved)))
    return _table(("link", "steps", "bytes", "MiB"), rows, ("left", "right", "right", "right"))


def _mib(size_bytes: int) -> str:
    """Three decimals, and never a zero for something."""
    return "<0.001" if 0 < size_bytes < _MIB / 2000 else f"{size_bytes / _MIB:.3f}"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: Sequence[str]) -> str:
    text = tabulate(
        rows,
        headers=headers,
        colalign=align,
        tablefmt="simple",
        disable_numparse=True,
    )
    return "\n".join(line.rstrip() for line in text.splitlines())
