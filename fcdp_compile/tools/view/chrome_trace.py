"""A plan's timeline as a trace for Perfetto and chrome://tracing.

Each schedule is a process, each lane a track, and arrows lead from a step to the steps that wait for it.
The model's own collectives within the node, which are parts of compute steps, have a track of their own.
Times are those of the simulated lanes (`tools.simulator.simulate`) with assumed speeds.  The measured times
of a schedule follow as another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fcdp_compile.plan import INNER, Bucket, Kind, Lane, Placement, Plan, Schedule, Step
from fcdp_compile.plan.cost import Machine, Slot, Timeline
from fcdp_compile.plan.recording import ScheduleKey
from fcdp_compile.tools.simulator import simulate

Event = dict[str, Any]

_MICROSECONDS = 1e6
_LANES = list(Lane)

_Placed = Mapping[int, tuple[Bucket, Placement]]
"""Buckets and their placements, by the bucket's number."""


def chrome_trace(
    plan: Plan,
    machine: Machine,
    *,
    first_process: int = 0,
    measured: Mapping[ScheduleKey, Timeline] | None = None,
) -> list[Event]:
    """The events of all schedules of a plan.

    first_process: the number of the first schedule's process; the others follow.
    """
    buckets = {pair[0].id: pair for pair in plan.placed}
    process = first_process
    events: list[Event] = []
    for schedule in plan.schedules:
        title = f"graph {plan.graph}, {schedule.direction.value} {schedule.variant.value}"
        times = {title: simulate(schedule, machine, plan.ranks_per_node)}
        if (found := (measured or {}).get((schedule.direction, schedule.variant))) is not None:
            times[f"{title}, measured"] = found
        for name, time in times.items():
            events += _process(schedule, time, buckets, name, process)
            process += 1
    return events


def _process(
    schedule: Schedule, time: Timeline, buckets: _Placed, title: str, process: int
) -> Iterator[Event]:
    tracks = _tracks(schedule, time)
    yield _about_track("process_name", process, name=title)
    yield _about_track("process_sort_index", process, sort_index=process)
    for track in sorted({*range(len(_LANES)), *tracks}):
        beside, lane = divmod(track, len(_LANES))
        name = _LANES[lane].value + (f" {beside + 1}" if beside else "")
        yield _about_track("thread_name", process, track, name=name)
        order = lane * len(schedule.steps) + beside
        yield _about_track("thread_sort_index", process, track, sort_index=order)
    yield from _slices(schedule, time, buckets, process, tracks)
    yield from _inner(schedule, time, process)
    yield from _arrows(schedule, time, process, tracks)


def _tracks(schedule: Schedule, time: Timeline) -> list[int]:
    """The track of each step: its lane's, or an extra track beside it while another step runs on that."""
    free_s: dict[int, float] = {}
    tracks = [0] * len(schedule.steps)
    for step in sorted(schedule.steps, key=lambda s: time.slots[s.index].start_s):
        slot, track = time.slots[step.index], _LANES.index(step.lane)
        while free_s.get(track, 0.0) > slot.start_s:
            track += len(_LANES)
        tracks[step.index] = track
        free_s[track] = slot.end_s
    return tracks


def _about_track(what: str, process: int, track: int = 0, **facts: str | int) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": facts}


def _slices(
    schedule: Schedule, time: Timeline, buckets: _Placed, process: int, tracks: Sequence[int]
) -> Iterator[Event]:
    for step, slot in zip(schedule.steps, time.slots, strict=True):
        if slot.end_s > slot.start_s or step.lane is not Lane.COMPUTE:
            about = _about(step, buckets)
            where = {"pid": process, "tid": tracks[step.index]}
            yield _slice(_name(step), step.kind.value, where, slot, about)


def _slice(name: str, kind: str, where: Event, slot: Slot, about: Event) -> Event:
    times = {"ts": slot.start_s, "dur": slot.end_s - slot.start_s}
    in_us = {key: seconds * _MICROSECONDS for key, seconds in times.items()}
    return {"ph": "X", "name": name, "cat": kind, **where, **in_us, "args": about}


def _inner(schedule: Schedule, time: Timeline, process: int) -> Iterator[Event]:
    """The track of the model's own collectives, after those of the lane within the node."""
    if not time.inner:
        return
    count = len(schedule.steps)  # no lane has so many tracks
    track = count * len(_LANES)
    yield _about_track("thread_name", process, track, name=INNER)
    order = _LANES.index(Lane.INTRA) * count + count - 1
    yield _about_track("thread_sort_index", process, track, sort_index=order)
    for index, slot in time.inner.items():
        step = schedule.steps[index]
        about = {"step": index, "bytes": step.inner_bytes}
        where = {"pid": process, "tid": track}
        yield _slice(f"in {_name(step)}", INNER, where, slot, about)


def _name(step: Step) -> str:
    if step.kind is Kind.COMPUTE:
        return step.label or step.kind.value
    waits_for = f" for {step.label}" if step.kind is Kind.WAIT else ""
    return f"{step.kind.value}{waits_for} {step.bucket}"


def _about(step: Step, buckets: _Placed) -> Event:
    about: Event = {"step": step.index, "waits for": list(step.waits)}
    if step.bytes:
        about["bytes"] = step.bytes
    if step.kind is Kind.COMPUTE:
        about |= {"flops": step.flops, "accessed bytes": step.accessed_bytes}
        more = {"bytes of kernels": step.kernel_bytes, "bytes within the node": step.inner_bytes}
        return about | {name: size for name, size in more.items() if size}
    if step.bucket is not None:
        bucket, placement = buckets[step.bucket]
        about |= {
            "bucket": bucket.id,
            "parameters": [p.name for p in bucket.params],
            "strategy": bucket.strategy.name,
            "tier": placement.tier.value,
            "why": f"{bucket.why}; {placement.why}",
        }
    return {**about, "label": step.label} if step.label else about


def _arrows(
    schedule: Schedule, time: Timeline, process: int, tracks: Sequence[int]
) -> Iterator[Event]:
    """Arrows from the end of a step to the start of each step on another lane that waits for it."""
    number = 0
    for step, slot in zip(schedule.steps, time.slots, strict=True):
        for index in step.waits:
            source = schedule.steps[index]
            if source.lane is step.lane:
                continue
            where = {"cat": "waits", "name": "waits", "id": f"{process}.{number}", "pid": process}
            number += 1
            left_s = _just_before_end(time.slots[index])
            # A wait begins when compute stops, and ends with the step that it waits for.
            arrived_s = min(max(slot.start_s, left_s), slot.end_s)
            leaves = {"ph": "s", "tid": tracks[index]}
            arrives = {"ph": "f", "bp": "e", "tid": tracks[step.index]}
            yield {**where, **leaves, "ts": left_s * _MICROSECONDS}
            yield {**where, **arrives, "ts": arrived_s * _MICROSECONDS}


def _just_before_end(slot: Slot) -> float:
    """A time inside of the slice, where an arrow must start."""
    return max(slot.start_s, slot.end_s - 1e-9)
