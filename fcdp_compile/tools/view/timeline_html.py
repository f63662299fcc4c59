"""Timelines of plans as one page for a browser, for somebody who has never seen a plan.

    plans -> simulated lanes (`simulator`) -> JSON inside of timeline/page.html, with its style and script

The page is one file: it fetches nothing, and its policy forbids fetching.  Names of parameters get into the
page only as JSON and become text, never markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from itertools import takewhile
from typing import Any

from fcdp_compile.errors import ArgumentError
from fcdp_compile.models.files.json_records import one_line
from fcdp_compile.plan import (
    Bucket,
    Kind,
    Lane,
    Placement,
    Plan,
    Schedule,
    Step,
)
from fcdp_compile.plan.cost import Machine, Timeline
from fcdp_compile.plan.kinds import Flow
from fcdp_compile.plan.recording import ScheduleKey
from fcdp_compile.plan.whole_step import of_one_step, whole_step
from fcdp_compile.tools.simulator import simulate
from fcdp_compile.tools.view.short_names import fold_numbers, fold_params
from fcdp_compile.tools.view.story import moved, tell, tell_sharding

Json = dict[str, Any]


SCRIPTS = ("data.js", "story.js", "axis.js", "lanes.js", "memory.js", "details.js", "page.js")
"""The parts of the page's script, in their order of execution."""

_MICROSECONDS = 1e6

_LANES: dict[Lane, tuple[str, str]] = {
    Lane.COMPUTE: ("Compute", "the GPU's work; hatched: the GPU waits"),
    Lane.INTER: ("Between nodes", "the slow network of the node"),
    Lane.INTRA: ("Within the node", "fast links among its ranks"),
    Lane.H2D: ("Host to GPU", "the bus, out of host memory"),
    Lane.D2H: ("GPU to host", "the bus, into host memory"),
}
"""The name and the meaning of each lane."""

_INNER_LANE: Json = {
    "id": "inner",
    "name": "Sent by the model",
    "text": "within the node, in compute",
}
_INNER_KIND: Json = {
    "id": "model_collectives",
    "lane": "inner",
    "text": "what the model itself sends within the node, as a part of a compute step",
    "flow": None,
}
"""Collectives of the model itself: no steps, but parts of compute steps."""

_LAST_GATHERS = frozenset({Kind.INTRA_ALL_GATHER, Kind.INTRA_REST_ALL_GATHER})
"""The gathers that result in whole parameters."""


def timeline_html(
    plans: Sequence[Plan],
    machine: Machine,
    *,
    measured: Mapping[int, Mapping[ScheduleKey, Timeline]] | None = None,
) -> str:
    """The text of the page: ASCII, so that any terminal and any redirection keeps it intact.

    measured: recorded times of plans, by position; shown beneath the predicted times of the same schedule.

    Raises: ValueError if a schedule has another number of steps than its measured times.
    """
    data = {
        "speeds": _speeds(machine),
        "lanes": list(_lanes(plans)),
        "kinds": [*map(_kind, Kind), _INNER_KIND],
        "graphs": [
            *_whole_step(plans, machine),
            *(
                _graph(plan, machine, (measured or {}).get(i, {}), title=f"graph {plan.graph}")
                for i, plan in enumerate(plans)
                if plan.schedules
            ),
        ],
    }
    parts = {
        "style": _read("page.css"),
        "data": _escaped(data),
        "script": "\n".join(_read(name) for name in SCRIPTS),
    }
    # In a single pass, so that text of an inserted part is never taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("page.html"))


def _read(name: str) -> str:
    return files("fcdp_compile.tools.view").joinpath("timeline", name).read_text(encoding="ascii")


def _escaped(data: Json) -> str:
    """JSON in which no name can end the script element: only `<` has a meaning for HTML there."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _speeds(machine: Machine) -> Json:
    links = {lane: asdict(getattr(machine, lane)) for lane in ("inter", "intra", "h2d", "d2h")}
    return {**links, "flops_per_s": machine.flops_per_s}


def _lanes(plans: Sequence[Plan]) -> Iterator[Json]:
    """The lanes; that of the model's own collectives only if there are any."""
    steps = (step for plan in plans for schedule in plan.schedules for step in schedule.steps)
    has_inner = any(step.inner_bytes for step in steps)
    for lane, (name, text) in _LANES.items():
        yield {"id": lane.value, "name": name, "text": text}
        if lane is Lane.INTRA and has_inner:
            yield _INNER_LANE


def _kind(kind: Kind) -> Json:
    flow = kind.flow and kind.flow.value
    return {"id": kind.value, "lane": kind.lane.value, "text": kind.text, "flow": flow}


def _whole_step(plans: Sequence[Plan], machine: Machine) -> Iterator[Json]:
    """The graphs of a step as one, if there are several."""
    parts = of_one_step(plans)
    if len(parts) > 1:
        title = f"the whole step, {len(parts)} graphs"
        yield _graph(whole_step(parts), machine, {}, title=title)


def _graph(
    plan: Plan,
    machine: Machine,
    measured: Mapping[ScheduleKey, Timeline],
    *,
    title: str,
) -> Json:
    return {
        "strategy": one_line(plan.strategy),
        "nodes": plan.nodes,
        "ranks_per_node": plan.ranks_per_node,
        "title": title,
        "sharding": tell_sharding(plan),
        "peak_bytes": plan.peak_bytes,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "buckets": _buckets(plan),
        "schedules": [
            _schedule(plan, s, machine, measured.get((s.direction, s.variant)))
            for s in plan.schedules
        ],
    }


def _buckets(plan: Plan) -> dict[int, Json]:
    """Buckets by id; the short titles leave out the beginning that all titles share."""
    titles = [one_line(_title(b)) for b in plan.buckets]
    columns = zip(*(title.split(".")[:-1] for title in titles), strict=False)
    shared = list(takewhile(lambda column: len(set(column)) == 1, columns))
    return {
        bucket.id: _bucket(bucket, placement, title, ".".join(title.split(".")[len(shared) :]))
        for (bucket, placement), title in zip(plan.placed, titles, strict=True)
    }


def _bucket(bucket: Bucket, placement: Placement, title: str, short: str) -> Json:
    return {
        "title": title,
        "short": short,
        "parameters": [one_line(line) for line in fold_params(bucket.params)],
        "strategy": one_line(bucket.strategy.name),
        "dtype": bucket.dtype,
        "tier": placement.tier.value,
        "frozen": bucket.frozen,
        "node_bytes": bucket.node_bytes,
        "full_bytes": bucket.full_bytes,
        "why": one_line(f"{bucket.why}; {placement.why}"),
    }


def _title(bucket: Bucket) -> str:
    """The module or layers that all of a bucket's parameters belong to: h.3, h.{3-4}."""
    names = [p.name.split(".") for p in bucket.params]
    common: list[str] = []
    for parts in zip(*names, strict=False):
        if len(set(parts)) == 1:
            common.append(parts[0])
            continue
        if all(part.isdecimal() for part in parts):
            common.append(f"{{{fold_numbers(sorted({int(part) for part in parts}))}}}")
        break
    return ".".join(common) or f"{bucket.params[0].name} ..."


def _schedule(plan: Plan, schedule: Schedule, machine: Machine, measured: Timeline | None) -> Json:
    steps, story = schedule.steps, tell(plan, schedule)
    return {
        "direction": schedule.direction.value,
        "variant": schedule.variant.value,
        "headline": story.headline,
        "text": story.text,
        "flows": {flow.value: moved(schedule)[flow] for flow in Flow},
        "kinds": [s.kind.value for s in steps],
        "buckets": [_bucket_of(s, steps) for s in steps],
        "bytes": [s.bytes for s in steps],
        "flops": [s.flops for s in steps],
        "inner_bytes": [s.inner_bytes for s in steps],
        "waits": [s.waits for s in steps],
        "labels": [one_line(s.label) for s in steps],
        "memory_bytes": schedule.memory_bytes,
        "predicted": _times(schedule, simulate(schedule, machine, plan.ranks_per_node)),
        "measured": None if measured is None else _times(schedule, measured),
    }


def _bucket_of(step: Step, steps: Sequence[Step]) -> int | None:
    """The bucket of a step; for compute, the last bucket whose weights the step waited for."""
    if step.kind is not Kind.COMPUTE:
        return step.bucket
    waited = [steps[i] for i in step.waits if steps[i].kind is Kind.WAIT]
    gathers = [steps[i] for wait in waited for i in wait.waits if steps[i].kind in _LAST_GATHERS]
    return gathers[-1].bucket if gathers else None


def _times(schedule: Schedule, timeline: Timeline) -> Json:
    if len(timeline.slots) != len(schedule.steps):
        raise ArgumentError(
            f"times of {len(timeline.slots)} steps do not belong to the {len(schedule.steps)} steps of "
            f"{schedule.direction.value} {schedule.variant.value}; record the plan that is shown"
        )
    return {
        "starts_us": [_us(slot.start_s) for slot in timeline.slots],
        "ends_us": [_us(slot.end_s) for slot in timeline.slots],
        "inner": [(i, _us(s.start_s), _us(s.end_s)) for i, s in timeline.inner.items()],
        "total_us": _us(timeline.total_s),
        "still_us": _us(_still_s(schedule, timeline)),
        "memory": list(_memory_curve(schedule, timeline)),
    }


def _us(seconds: float) -> float:
    return round(seconds * _MICROSECONDS, 3)


def _still_s(schedule: Schedule, timeline: Timeline) -> float:
    """The time in which no operator of the model runs."""
    pairs = zip(schedule.steps, timeline.slots, strict=True)
    return timeline.total_s - sum(t.end_s - t.start_s for s, t in pairs if s.kind is Kind.COMPUTE)


def _memory_curve(schedule: Schedule, timeline: Timeline) -> Iterator[tuple[float, int, int]]:
    """Points of a curve: the time in microseconds, the bytes in use from then on, and the step.

    Memory is predicted in program order, and only compute and waits take time there: memory of steps that
    start in between is counted for the next compute or wait.
    """
    most = (0, 0)
    for step, slot, size in zip(
        schedule.steps, timeline.slots, schedule.memory_bytes, strict=False
    ):
        most = max(most, (size, step.index))
        if step.lane is Lane.COMPUTE and slot.end_s > slot.start_s:
            yield (_us(slot.start_s), *most)
            most = (0, 0)
