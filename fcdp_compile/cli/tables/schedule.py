"""A schedule as tables: its ordered steps, the bytes over each link, and its times."""

from __future__ import annotations

from fcdp_compile.cli.tables.table import mib, ms, table
from fcdp_compile.files.json_records import one_line
from fcdp_compile.plan import INNER, Lane, Schedule, Step
from fcdp_compile.plan.cost import Slot, Timeline
from fcdp_compile.view.short_names import fold_numbers

_LINKS = (Lane.INTER, Lane.INTRA, Lane.H2D, Lane.D2H)


def format_schedule(schedule: Schedule, title: str, times: dict[str, Timeline]) -> str:
    """Return the tables under a title; times: timelines by their name, such as "predicted"."""
    sections = [title, _format_steps(schedule, times), _format_links(schedule)]
    if times:
        sections.append(_format_times(times))
    return "\n\n".join(sections)


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
