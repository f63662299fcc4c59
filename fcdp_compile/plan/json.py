"""Plans as JSON files; docs/plan-schema.md describes the text.

`plan.check` checks the rules that types cannot express (references, ranges, slots that line up).
"""

from __future__ import annotations

import os

from fcdp_compile.errors import PlanFormatError
from fcdp_compile.files.json_records import MAX_FILE_BYTES, RecordFormat, one_line
from fcdp_compile.params.layout import ParamLayout
from fcdp_compile.plan import SCHEMA, Plan
from fcdp_compile.plan.check import check_layout, check_plan
from fcdp_compile.plan.diff import diff

__all__ = [
    "MAX_FILE_BYTES",
    "diff",
    "from_json",
    "one_line",
    "read_plan",
    "to_json",
    "write_plan",
]

_FORMAT = RecordFormat(
    record=Plan,
    schema=SCHEMA,
    what="plan",
    remedy="compile again with the option dump to get a good file",
    error=PlanFormatError,
    check=check_plan,
    check_fields={ParamLayout: check_layout},
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
