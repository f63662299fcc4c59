"""Recorded starts and ends of steps: a file beside the plan.

    runs of a program -> RecordedRun -> Recording (one schedule) -> RecordingFile (one plan) -> Timeline

Data only; `runtime.recorder` records the times, docs/recording.md describes the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fcdp_compile.errors import ArgumentError, RecordingError
from fcdp_compile.models.files.json_records import RecordFormat, one_line
from fcdp_compile.plan import Direction, Kind, Lane, Plan, Schedule, Variant
from fcdp_compile.plan.cost import Slot, Timeline

SCHEMA = "fcdp.recording/1"
SUFFIX = ".recorded.json"

_REMEDY = "record again with the options dump and record, or delete the file"

ScheduleKey = tuple[Direction, Variant]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """When each step of one run started and ended on its lane, in seconds since the run's start.

    Raises: ValueError if a step ends before it starts, or for negative or infinite times.
    """

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.starts_s) != len(self.ends_s):
            raise ArgumentError(f"{len(self.starts_s)} starts for {len(self.ends_s)} ends")
        for i, (start_s, end_s) in enumerate(zip(self.starts_s, self.ends_s, strict=True)):
            if not 0 <= start_s <= end_s < math.inf:
                raise ArgumentError(f"step {i} lasts from {start_s} s to {end_s} s")

    @property
    def total_s(self) -> float:
        """When the last step ended."""
        return max(self.ends_s, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The runs of one schedule on one rank, in the order in which they were made.

    plan: the digest of its plan.  graph: the plan's number.

    Raises: ValueError if there is no run, or if runs have different numbers of steps.
    """

    plan: str
    graph: int
    direction: Direction
    variant: Variant
    runs: tuple[RecordedRun, ...]

    def __post_init__(self) -> None:
        if not self.runs:
            raise ArgumentError("it has no runs")
        if len(counts := sorted({len(run.ends_s) for run in self.runs})) > 1:
            raise ArgumentError(f"some runs have {counts[0]} steps and others {counts[-1]}")

    @property
    def key(self) -> ScheduleKey:
        """The schedule of the plan that was run."""
        return self.direction, self.variant


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingFile:
    """The recordings of one plan.

    Raises: ValueError for two recordings of one schedule.
    """

    recordings: tuple[Recording, ...]

    def __post_init__(self) -> None:
        keys = [r.key for r in self.recordings]
        for direction, variant in keys:
            if keys.count((direction, variant)) > 1:
                raise ArgumentError(f"{direction.value} {variant.value} was recorded twice")


FORMAT = RecordFormat(
    record=RecordingFile,
    schema=SCHEMA,
    what="recording",
    remedy=_REMEDY,
    error=RecordingError,
)


def write_recordings(path: str | os.PathLike[str], recordings: Sequence[Recording]) -> None:
    """Write the recordings of one plan to a file that others see either whole or not at all.

    Raises: OSError if the file cannot be written.
    """
    FORMAT.write(path, RecordingFile(recordings=tuple(recordings)))


def read_recordings(folder: str | os.PathLike[str]) -> dict[str, tuple[Recording, ...]]:
    """Read the recordings of the plans in a folder, by the name that plan and recording share.

    Raises: RecordingError with the file, the field and the fault; OSError if a file cannot be read.
    """
    found = sorted(Path(folder).glob(f"*{SUFFIX}"))
    return {path.name.removesuffix(SUFFIX): FORMAT.read(path).recordings for path in found}


def measured(recording: Recording, schedule: Schedule) -> Timeline:
    """The run of median duration (of an even number, the shorter of the two) as a timeline.

    A lane is busy while any step is on it; the compute lane while it computes, not while it waits.

    Raises: RecordingError if the recording has another number of steps than the schedule.
    """
    runs = sorted(recording.runs, key=lambda run: run.total_s)
    run = runs[(len(runs) - 1) // 2]
    if len(run.ends_s) != len(schedule.steps):
        raise RecordingError(
            f"{_name(recording)} was recorded with {len(run.ends_s)} steps and the plan has "
            f"{len(schedule.steps)}; {_REMEDY}"
        )
    slots = tuple(
        Slot(start_s=start_s, end_s=end_s)
        for start_s, end_s in zip(run.starts_s, run.ends_s, strict=True)
    )
    busy_s = {
        lane: _covered_s(
            slot
            for step, slot in zip(schedule.steps, slots, strict=True)
            if step.lane is lane and step.kind is not Kind.WAIT
        )
        for lane in Lane
    }
    return Timeline(slots=slots, busy_s=busy_s, total_s=run.total_s)


def timelines(plan: Plan, recordings: Sequence[Recording]) -> dict[ScheduleKey, Timeline]:
    """The measured timeline of each recorded schedule of a plan.

    Raises: RecordingError for a recording of another plan.
    """
    schedules = {(s.direction, s.variant): s for s in plan.schedules}
    digest = plan.digest()
    for recording in recordings:
        if (recording.plan, recording.graph) != (digest, plan.graph):
            raise RecordingError(
                f"{_name(recording)} was recorded with the plan {one_line(recording.plan[:12])} of graph "
                f"{recording.graph}, not with {digest[:12]} of graph {plan.graph}; {_REMEDY}"
            )
        if recording.key not in schedules:
            raise RecordingError(
                f"{_name(recording)} was recorded, but the plan has no schedule for it; {_REMEDY}"
            )
    return {r.key: measured(r, schedules[r.key]) for r in recordings}


def _name(recording: Recording) -> str:
    return f"{recording.direction.value} {recording.variant.value}"


def _covered_s(slots: Iterable[Slot]) -> float:
    """Seconds that at least one slot covers."""
    covered_s = until_s = 0.0
    for slot in sorted(slots, key=lambda s: s.start_s):
        covered_s += max(0.0, slot.end_s - max(slot.start_s, until_s))
        until_s = max(until_s, slot.end_s)
    return covered_s
