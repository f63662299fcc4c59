"""A plan as tables for a terminal: buckets, the ordered steps of each schedule, all about one bucket."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fcdp_compile.errors import RecordingError
from fcdp_compile.models.files.json_records import one_line
from fcdp_compile.plan import INNER, Bucket, Lane, Placement, Plan, Schedule, Step
from fcdp_compile.plan.cost import Machine, Slot, Timeline
from fcdp_compile.plan.recording import SUFFIX, ScheduleKey, read_recordings, timelines
from fcdp_compile.strategy.formats import Format
from fcdp_compile.tools.simulator import simulate
from fcdp_compile.tools.view.short_names import fold_numbers, fold_params
from fcdp_compile.tools.view.table import mib, ms, table, wrapped

_NUMBERS = ("bucket", "parameters", "slot MiB", "node MiB", "full MiB")
_FACTS = ("dtype", "reduce dtype", "frozen", "strategy", "tier")

_LINKS = (Lane.INTER, Lane.INTRA, Lane.H2D, Lane.D2H)


def format_plan(name: str, plan: Plan, *, machine: Machine, note: str, measured: Measured) -> str:
    """Return the buckets of a plan, and each schedule's steps, bytes over each link, and times.

    note: the source of the speeds of `machine`.
    """
    header = (
        f"{one_line(name)}: "
        f"graph {plan.graph}, strategy {one_line(plan.strategy)}, "
        f"{plan.nodes} x {plan.ranks_per_node} ranks (N x g), digest {plan.digest()[:12]}"
    )
    refresh = fold_numbers(sorted(plan.refresh)) or "none"
    if measured:
        note += "; measured: the median of the recorded runs of each schedule, on one rank"
    sections = [header, _format_buckets(plan), f"refresh before a forward: {refresh}", note]
    directions = [schedule.direction for schedule in plan.schedules]
    for schedule in plan.schedules:
        title = schedule.direction.value
        if directions.count(schedule.direction) > 1:
            title += f" {schedule.variant.value}"
        times = {"predicted": simulate(schedule, machine, plan.ranks_per_node)}
        if (found := measured.get((schedule.direction, schedule.variant))) is not None:
            times["measured"] = found
        sections.append(_format_schedule(schedule, title, times))
    return "\n\n".join(sections)


def _format_buckets(plan: Plan) -> str:
    """Return the table of buckets, and below it each bucket's contents; names are too long for a column."""
    rows = [_bucket_row(*pair) for pair in plan.placed]
    count = sum(len(bucket.params) for bucket in plan.buckets)
    rows.append(("total", str(count), *_sizes(*plan.buckets), "", "", "", "", ""))
    align = (*["right"] * len(_NUMBERS), *["left"] * len(_FACTS))
    contents = [line for pair in plan.placed for line in _contents(*pair)]
    return "\n".join([table((*_NUMBERS, *_FACTS), rows, align), *contents])


def _contents(bucket: Bucket, placement: Placement) -> list[str]:
    names = [f"  {one_line(line)}" for line in fold_params(bucket.params)]
    why = one_line(f"{bucket.why}; {placement.why}")
    return ["", wrapped(f"bucket {bucket.id}: {why}"), *names]


def _bucket_row(bucket: Bucket, placement: Placement) -> tuple[str, ...]:
    return (
        str(bucket.id),
        str(len(bucket.params)),
        *_sizes(bucket),
        bucket.dtype,
        bucket.reduce_dtype,
        "yes" if bucket.frozen else "no",
        one_line(bucket.strategy.name),
        placement.tier.value,
    )


def _sizes(*buckets: Bucket) -> tuple[str, ...]:
    """Return the sums of slots, node shards and full parameters in MiB."""
    sizes = [(b.slot_bytes, b.node_bytes, b.full_bytes) for b in buckets] or [(0, 0, 0)]
    return tuple(mib(sum(column)) for column in zip(*sizes, strict=True))


def _format_schedule(schedule: Schedule, title: str, times: dict[str, Timeline]) -> str:
    """Return the tables under a title; times: timelines by their name, such as "predicted"."""
    tables = (_format_steps(schedule, times), _format_links(schedule), _format_times(times))
    return "\n\n".join([title, *tables])


def _format_steps(schedule: Schedule, times: dict[str, Timeline]) -> str:
    timed = [f"{name} ms" for name in times]
    headers = ("step", "kind", "lane", "bucket", "bytes", "waits for", *timed, "label")
    rows = [
        (*_step_row(step), *(_slot(time.slots[i]) for time in times.values()), one_line(step.label))
        for i, step in enumerate(schedule.steps)
    ]
    moved = sum(step.bytes for step in schedule.steps)
    total = ("total", f"{len(schedule.steps)} steps", "", "", str(moved), "", *[""] * len(times))
    rows.append((*total, ""))
    align = ("right", "left", "left", "right", "right", "left", *["right"] * len(times), "left")
    return table(headers, rows, align, flexible=len(headers) - 1)


def _step_row(step: Step) -> tuple[str, ...]:
    return (
        str(step.index),
        step.kind.value,
        step.lane.value,
        "" if step.bucket is None else str(step.bucket),
        str(step.bytes),
        fold_numbers(sorted(step.waits)),
    )


def _slot(slot: Slot) -> str:
    """Return when a step starts, and how long it takes."""
    return f"{ms(slot.start_s)} +{ms(slot.end_s - slot.start_s)}"


def _format_links(schedule: Schedule) -> str:
    rows = []
    for lane in _LINKS:
        steps = [step for step in schedule.steps if step.lane is lane]
        moved = sum(step.bytes for step in steps)
        rows.append((lane.value, str(len(steps)), str(moved), mib(moved)))
        sent = [step.inner_bytes for step in schedule.steps if step.inner_bytes]
        if lane is Lane.INTRA and sent:
            rows.append((INNER, f"in {len(sent)}", str(sum(sent)), mib(sum(sent))))
    return table(("link", "steps", "bytes", "MiB"), rows, ("left", "right", "right", "right"))


def _format_times(times: dict[str, Timeline]) -> str:
    """Return a table of the total time, how long compute waits, and how long each lane is busy."""
    has_inner = any(time.inner for time in times.values())
    headers = ("ms", "total", "exposed", *(lane.value for lane in Lane), *[INNER] * has_inner)
    rows = [
        (
            *(name, ms(t.total_s), ms(t.exposed_s), *(ms(t.busy_s[lane]) for lane in Lane)),
            *[ms(t.inner_s) if t.inner else ""] * has_inner,
        )
        for name, t in times.items()
    ]
    return table(headers, rows, ("left", *["right"] * (len(headers) - 1)))


def explain_bucket(plan: Plan, bucket: Bucket) -> str:
    """Explain a bucket: its parameters, sizes, reasons, and its steps in each schedule."""
    placement = plan.placement(bucket.id)
    sizes = f"{bucket.slot_bytes} bytes a rank, {bucket.node_bytes} a node shard, {bucket.full_bytes} in full"
    lines = [
        f"bucket {bucket.id} of graph {plan.graph}, strategy {one_line(str(bucket.strategy))}",
        *(f"  {one_line(line)}" for line in fold_params(bucket.params)),
        f"size: {sizes}; {one_line(bucket.why)}",
        f"tier: {placement.tier.value}; {one_line(placement.why)}",
        f"between nodes: {_formats(bucket)}; gathers: {bucket.algorithm.value}",
        f"gradients: {_gradients(bucket, placement)}",
    ]
    for schedule in plan.schedules:
        lines += _moves(schedule, bucket)
    return "\n".join(lines)


def _formats(bucket: Bucket) -> str:
    shown = {Format.FULL: "unchanged"}
    weights = shown.get(bucket.wire, bucket.wire.value)
    if bucket.frozen:
        return f"weights {weights}"
    return f"weights {weights}, gradients {shown.get(bucket.reduce_wire, bucket.reduce_wire.value)}"


def _gradients(bucket: Bucket, placement: Placement) -> str:
    if bucket.frozen:
        return "none, it is frozen"
    waits = {
        "none": "they are reduced to the home shards in every micro-batch",
        "host": "within no_sync they wait in host memory",
        "gpu": "within no_sync they wait on the gpu",
    }
    return f"in {bucket.reduce_dtype}; {waits[placement.gradient_tier.value]}"


def _moves(schedule: Schedule, bucket: Bucket) -> list[str]:
    steps = [s for s in schedule.steps if s.bucket == bucket.id]
    title = f"{schedule.direction.value} {schedule.variant.value}"
    if not steps:
        return [f"{title}: not used"]
    return [f"{title}:", *(f"  {_move(step, len(schedule.steps))}" for step in steps)]


def _move(step: Step, count: int) -> str:
    sent = f", {step.bytes} bytes" if step.bytes else ""
    label = f", {one_line(step.label)}" if step.label else ""
    return f"step {step.index} of {count}: {step.kind.value}{label}{sent}"


PLAN_SUFFIX = ".plan.json"

Measured = Mapping[ScheduleKey, Timeline]
"""The measured times of a plan's schedules."""


def read_measured(folder: str, plans: Mapping[Path, Plan]) -> dict[Path, Measured]:
    """Return the measured times of each plan that has a recording in the folder.

    plans: plans with all schedules.

    Raises: RecordingError for a damaged recording, or one of another plan; OSError if one cannot be read.
    """
    recordings = read_recordings(folder)
    found: dict[Path, Measured] = {}
    for path, plan in plans.items():
        stem = path.name.removesuffix(PLAN_SUFFIX)
        if stem in recordings:
            try:
                found[path] = timelines(plan, recordings[stem])
            except RecordingError as error:
                raise RecordingError(f"{path.with_name(stem + SUFFIX)}: {error}") from None
    return found
