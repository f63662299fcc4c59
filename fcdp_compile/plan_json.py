"""Plans as JSON files: written for people to read and diff, read back with suspicion.

    Plan -> to_json -> text -> from_json -> Plan          docs/plan-schema.md describes the text

The fields of a file are those of the dataclasses of `plan` and `layout`, so the reader walks their
type hints and a field added there needs no code here.  What types cannot say (references, ranges,
slots that line up) is checked by `plan_check`.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fcdp_compile.errors import PlanFormatError
from fcdp_compile.layout import ParamLayout
from fcdp_compile.plan import SCHEMA, Plan
from fcdp_compile.plan_check import MAX_INT, PlanFault, check_layout, check_plan, describe, fail
from fcdp_compile.plan_diff import diff

__all__ = ["diff", "from_json", "one_line", "read_plan", "to_json", "write_plan"]

MAX_FILE_BYTES = 2**28  # a plan of 1000 layers is below 2**24

_WIDTH = 100
_REMEDY = "compile again with the option dump to get a good file"


class _Repeated:
    """Stands for a JSON object that has one key twice, until the walk knows its path."""

    def __init__(self, key: str) -> None:
        self.key = key


def to_json(plan: Plan) -> str:
    """Write a plan as JSON text: fields in the order of the dataclasses, one step a line."""
    return _layout_text({"schema": SCHEMA, **_plain(plan)}, indent=0) + "\n"


def from_json(text: str, *, source: str) -> Plan:
    """Read a plan from JSON text and prove that it is one.

    source: the name of the text in messages, usually its file.

    Raises: PlanFormatError, with one line that names the source, the field and the fault.
    """
    try:
        return _read_document(_parse(text))
    except PlanFault as fault:
        raise PlanFormatError(one_line(f"{source}: {fault}; {_REMEDY}")) from None


def write_plan(path: str | os.PathLike[str], plan: Plan) -> None:
    """Write a plan to a file that others see either whole or not at all.

    Raises: OSError where the file cannot be written.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        aside.write_text(to_json(plan), encoding="utf-8")
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan from a file.

    Raises: PlanFormatError as `from_json`; OSError where the file is missing or cannot be read.
    """
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
        raise PlanFormatError(one_line(f"{path}: is not a regular file; {_REMEDY}"))
    if status.st_size > MAX_FILE_BYTES:
        problem = f"is larger than any plan ({MAX_FILE_BYTES} bytes)"
        raise PlanFormatError(one_line(f"{path}: {problem}; {_REMEDY}"))
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise PlanFormatError(
            one_line(f"{path}: is not UTF-8 text at byte {error.start}; {_REMEDY}")
        ) from None
    return from_json(text, source=str(path))


def one_line(text: str) -> str:
    """Escape what is not printable, so that no name can break a line or a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# Writing.


def _plain(value: object) -> Any:
    """Turn records, tuples and enums into dicts, lists and strings."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _layout_text(value: Any, *, indent: int) -> str:
    """JSON text of `value`, on one line where it fits, else one item a line."""
    flat = json.dumps(value)
    if len(flat) + indent <= _WIDTH or not isinstance(value, dict | list) or not value:
        return flat
    pad, end = " " * (indent + 2), " " * indent
    if isinstance(value, list):
        items = [pad + _layout_text(item, indent=indent + 2) for item in value]
        return "[\n" + ",\n".join(items) + f"\n{end}]"
    items = [
        f"{pad}{json.dumps(key)}: {_layout_text(item, indent=indent + 2)}"
        for key, item in value.items()
    ]
    return "{\n" + ",\n".join(items) + f"\n{end}}}"


# Reading: text to values, values to records.


def _parse(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_bounded_int)
    except RecursionError:
        raise PlanFault("", "is nested too deeply to be a plan") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise PlanFault("", f"is not JSON at {where} ({error.msg})") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object] | _Repeated:
    record = dict(pairs)
    if len(record) == len(pairs):
        return record
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return _Repeated(key)
        seen.add(key)
    raise AssertionError(f"{len(pairs)} pairs, {len(record)} keys, none repeated")


def _bounded_int(digits: str) -> int:
    """Read an integer; any that is out of range becomes the nearest such, without the cost."""
    if len(digits) <= len(str(MAX_INT)):
        return int(digits)
    return -1 if digits.startswith("-") else MAX_INT + 1


def _read_document(document: object) -> Plan:
    if isinstance(document, _Repeated):
        fail(_join("", document.key), "appears twice")
    if not isinstance(document, dict):
        fail("", f"is {describe(document)}, not the JSON object of a plan")
    if "schema" not in document:
        fail("schema", f'is missing, so this is not a plan (expected "{SCHEMA}")')
    schema = document["schema"]
    if schema != SCHEMA:
        fail("schema", f'is {describe(schema)}, but this version of fcdp reads "{SCHEMA}"')
    plan: Plan = _read_record(Plan, {k: v for k, v in document.items() if k != "schema"}, "")
    check_plan(plan)
    return plan


def _read(hint: Any, value: object, path: str) -> Any:
    """Read a JSON value as what the type hint of a plan's field says."""
    origin = get_origin(hint)
    if origin is UnionType:
        (inner,) = (arg for arg in get_args(hint) if arg is not type(None))
        return None if value is None else _read(inner, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            fail(path, f"is {describe(value)}, not a list")
        item = get_args(hint)[0]
        return tuple(_read(item, v, f"{path}[{i}]") for i, v in enumerate(value))
    if is_dataclass(hint):
        return _read_record(hint, value, path)
    if issubclass(hint, Enum):
        return _read_enum(hint, value, path)
    return _SCALARS[hint](value, path)


def _read_record(cls: Any, value: object, path: str) -> Any:
    if isinstance(value, _Repeated):
        fail(_join(path, value.key), "appears twice")
    if not isinstance(value, dict):
        fail(path, f"is {describe(value)}, not an object")
    hints = _hints(cls)
    for name in hints:
        if name not in value:
            fail(_join(path, name), "is missing")
    for key in value:
        if key not in hints:
            fail(_join(path, key), f"is not a field here; the fields are {', '.join(hints)}")
    values = {name: _read(hint, value[name], _join(path, name)) for name, hint in hints.items()}
    if cls is ParamLayout:
        check_layout(**values, path=path)
    try:
        return cls(**values)
    except ValueError as error:  # a strategy that does not exist
        fail(path, f"is impossible: {error}")


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _read_enum(enum: type[Enum], value: object, path: str) -> Enum:
    for member in enum:
        if member.value == value:
            return member
    fail(path, f"is {describe(value)}, not one of {', '.join(str(m.value) for m in enum)}")


def _read_int(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        fail(path, f"is {describe(value)}, not a whole number")
    if value < 0:
        fail(path, "is negative")
    if value > MAX_INT:
        fail(path, f"is larger than {MAX_INT}")
    return value


def _read_bool(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        fail(path, f"is {describe(value)}, not true or false")
    return value


def _read_str(value: object, path: str) -> str:
    if not isinstance(value, str):
        fail(path, f"is {describe(value)}, not a string")
    if any("\ud800" <= c <= "\udfff" for c in value):
        fail(path, "contains half of a surrogate pair, which is not text")
    return value


_SCALARS = {int: _read_int, bool: _read_bool, str: _read_str}


def _join(path: str, name: str) -> str:
    if not name.isidentifier() or len(name) > 40:
        return f"{path}[{describe(name)}]"
    return f"{path}.{name}" if path else name
