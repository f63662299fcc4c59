"""Predicted and measured times of the schedules in a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fcdp_compile.errors import RecordingError
from fcdp_compile.plan import Plan
from fcdp_compile.plan.cost import Timeline
from fcdp_compile.plan.recording import SUFFIX, ScheduleKey, read_recordings, timelines

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
