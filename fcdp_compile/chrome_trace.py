"""A plan in time, as a trace that Perfetto and chrome://tracing open.

One process for each schedule, one track for each lane, arrows from a step to those that wait for it.  Times
are those of the simulated lanes (`cost.simulate`) with assumed speeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fcdp_compile.cost import Machine, Slot, Timeline, simulate
from fcdp_compile.plan import Bucket, Kind, Lane, Plan, Schedule, Step

Event = dict[str, Any]

_MICROSECONDS = 1e6
_LANES = list(Lane)


def chrome_trace(plan: Plan, machine: Machine, *, first_process: int = 0) -> list[Event]:
    """The events of all schedules of a plan.

    first_process: the number of the first schedule's process; the others follow.
    """
    buckets = {b.id: b for b in plan.buckets}
    events: list[Event] = []
    for process, schedule in enumerate(plan.schedules, first_process):
        time = simulate(schedule, machine, plan.ranks_per_node)
        title = f"graph {plan.graph}, {schedule.direction.value} {schedule.variant.value}"
        events.append(_named("process_name", title, process))
        events.append(
            {**_named("process_sort_index", "", process), "args": {"sort_index": process}}
        )
        events += [_named("thread_name", lane.value, process, i) for i, lane in enumerate(_LANES)]
        events += _slices(schedule, time, buckets, process)
        events += _arrows(schedule, time, process)
    return events


def _named(what: str, name: str, process: int, track: int = 0) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _slices(
    schedule: Schedule, time: Timeline, buckets: Mapping[int, Bucket], process: int
) -> Iterator[Event]:
    for step, slot in zip(schedule.steps, time.slots, strict=True):
        if slot.end_s > slot.start_s or step.lane is not Lane.COMPUTE:
            yield {
                "ph": "X",
                "name": _name(step),
                "cat": step.kind.value,
                "pid": process,
                "tid": _LANES.index(step.lane),
                "ts": slot.start_s * _MICROSECONDS,
                "dur": (slot.end_s - slot.start_s) * _MICROSECONDS,
                "args": _about(step, buckets),
            }


def _name(step: Step) -> str:
    if step.kind is Kind.COMPUTE:
        return step.label or step.kind.value
    waits_for = f" for {step.label}" if step.kind is Kind.WAIT else ""
    return f"{step.kind.value}{waits_for} {step.bucket}"


def _about(step: Step, buckets: Mapping[int, Bucket]) -> Event:
    about: Event = {"step": step.index, "waits for": list(step.waits)}
    if step.bytes:
        about["bytes"] = step.bytes
    if step.kind is Kind.COMPUTE:
        return {**about, "flops": step.flops, "accessed bytes": step.accessed_bytes}
    if step.bucket is not None:
        bucket = buckets[step.bucket]
        about |= {
            "bucket": bucket.id,
            "parameters": [p.name for p in bucket.params],
            "strategy": bucket.strategy.name,
            "tier": bucket.tier.value,
            "why": bucket.why,
        }
    return {**about, "label": step.label} if step.label else about


def _arrows(schedule: Schedule, time: Timeline, process: int) -> Iterator[Event]:
    """From the end of a step to the start of one on another lane that waits for it."""
    number = 0
    for step, slot in zip(schedule.steps, time.slots, strict=True):
        for index in step.waits:
            source = schedule.steps[index]
            if source.lane is step.lane:
                continue
            where = {"cat": "waits", "name": "waits", "id": f"{process}.{number}", "pid": process}
            number += 1
            left_s = _just_before_end(time.slots[index])
            # A wait begins when compute stands still, and ends with what it waits for.
            arrived_s = min(max(slot.start_s, left_s), slot.end_s)
            leaves = {"ph": "s", "tid": _LANES.index(source.lane)}
            arrives = {"ph": "f", "bp": "e", "tid": _LANES.index(step.lane)}
            yield {**where, **leaves, "ts": left_s * _MICROSECONDS}
            yield {**where, **arrives, "ts": arrived_s * _MICROSECONDS}


def _just_before_end(slot: Slot) -> float:
    """A time inside of the slice, which an arrow must leave from."""
    return max(slot.start_s, slot.end_s - 1e-9)
