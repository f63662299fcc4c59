"""Plans as JSON files; docs/plan-schema.md describes the text."""

from __future__ import annotations

import os

from fcdp_compile.errors import PlanFormatError
from fcdp_compile.models.files.json_records import RecordFormat, fail
from fcdp_compile.plan import SCHEMA, Kind, Plan


def _check(plan: Plan) -> None:
    """Check that references in a plan lead somewhere, because readers follow them without looking.

    Raises: json_records.Fault.
    """
    ids = [bucket.id for bucket in plan.buckets]
    if [placement.bucket for placement in plan.placements] != ids:
        fail("placements", "are not those of the buckets, in their order")
    for i, bucket in enumerate(plan.buckets):
        if not bucket.params:
            fail(f"buckets[{i}].params", "is empty")
    for i, schedule in enumerate(plan.schedules):
        if len(schedule.memory_bytes) not in (0, len(schedule.steps)):
            fail(f"schedules[{i}].memory_bytes", "has not one entry for each step")
        for j, step in enumerate(schedule.steps):
            at = f"schedules[{i}].steps[{j}]"
            if step.index != j or any(wait >= j for wait in step.waits):
                fail(at, "waits for a step that is not before it, or has the index of another one")
            if step.bucket not in ids and (
                step.bucket is not None or step.kind is not Kind.COMPUTE
            ):
                fail(f"{at}.bucket", f"is {step.bucket}, which is no bucket of the plan")


_FORMAT = RecordFormat(
    record=Plan,
    schema=SCHEMA,
    what="plan",
    remedy="compile again with the option dump to get a good file",
    error=PlanFormatError,
    check=_check,
)


def to_json(plan: Plan) -> str:
    """Write a plan as JSON text: fields in the order of the dataclasses, one line for each step."""
    return _FORMAT.to_json(plan)


def from_json(text: str, *, source: str) -> Plan:
    """Read a plan from JSON text and check it.

    source: the name of the text in messages, usually its file.

    Raises: PlanFormatError, with one line that names the source, the field and the fault.
    """
    return _FORMAT.from_json(text, source=source)


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write a plan to a file that others see either whole or not at all.

    Raises: OSError if the file cannot be written.
    """
    _FORMAT.write(path, plan)


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file.

    Raises: PlanFormatError as `from_json`; OSError if the file is missing or cannot be read.
    """
    return _FORMAT.read(path)
