"""Records as JSON files: written for people to read and diff, and checked strictly when they are read.

    record -> to_json -> text -> from_json -> record

The fields of a file are those of frozen dataclasses, so the reader follows their type hints and a field added
there needs no code here.  Each format checks what types cannot express; its faults name the field by its path
in the file, such as `buckets[2].params[0].layout.dim`.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Generic, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from fcdp_compile.errors import FcdpError
from fcdp_compile.models.files.aside import written_aside

MAX_FILE_BYTES = 2**28  # a plan of 1000 layers is below 2**24
MAX_INT = 2**63 - 1  # torch's largest integer; whole numbers in files are between 0 and this

_WIDTH = 100

R = TypeVar("R")


class Fault(Exception):
    """A fault of the field at a path; becomes the format's error once the file is known."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)


LATER: Mapping[str, bool] = {"later": True}
"""The metadata of a field that older files lack: they mean its default, which is not written."""


def fail(path: str, problem: str) -> NoReturn:
    """Raise the fault of one field."""
    raise Fault(path, problem)


def describe(value: object) -> str:
    """Describe a value in a few words; containers, of any size and depth, by their type."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str) and len(value) > 40:
        return f"{json.dumps(value[:40])}..."
    if value is None or isinstance(value, str | int | float):
        return json.dumps(value)
    return "an object"


def one_line(text: str) -> str:
    """Escape characters that are not printable, so that no name can break a line or a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _nothing(record: object) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat(Generic[R]):
    """A kind of file: the record that it holds and the schema that identifies it.

    what: its name in messages, such as "plan".  remedy: what a user with a bad file should do.  error: the
    class of errors.  check: checks a whole record, raising Fault.  check_text: checks the file's text first.
    """

    record: type[R]
    schema: str
    what: str
    remedy: str
    error: type[FcdpError]
    check: Callable[[R], None] = _nothing
    check_text: Callable[[str], None] = _nothing

    def to_json(self, record: R) -> str:
        """Write a record as JSON text: fields in the order of the dataclasses."""
        return _layout_text({"schema": self.schema, **_plain(record)}, indent=0) + "\n"

    def from_json(self, text: str, *, source: str) -> R:
        """Read a record from JSON text and check it.

        source: the name of the text in messages, usually its file.

        Raises: `error`, with one line that names the source, the field and the fault.
        """
        try:
            return self._read_document(_parse(text), text)
        except Fault as fault:
            raise self._error(source, str(fault)) from None

    def write(self, path: str | os.PathLike[str], record: R) -> None:
        """Write a record to a file that other processes see either whole or not at all.

        Raises: OSError if the file cannot be written.
        """
        with written_aside(Path(path)) as aside:
            aside.write_text(self.to_json(record), encoding="utf-8")

    def read(self, path: str | os.PathLike[str]) -> R:
        """Read a record from a file.

        Raises: `error` as `from_json`; OSError if the file is missing or cannot be read.
        """
        path = Path(path)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise self._error(path, "is not a regular file")
        if status.st_size > MAX_FILE_BYTES:
            raise self._error(path, f"is larger than any {self.what} ({MAX_FILE_BYTES} bytes)")
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(path, f"is not UTF-8 text at byte {error.start}") from None
        return self.from_json(text, source=str(path))

    def _error(self, source: object, problem: str) -> FcdpError:
        return self.error(one_line(f"{source}: {problem}; {self.remedy}"))

    def _read_document(self, document: object, text: str) -> R:
        if isinstance(document, _Repeated):
            fail(_join("", document.key), "appears twice")
        if not isinstance(document, dict):
            fail("", f"is {describe(document)}, not the JSON object of a {self.what}")
        if "schema" not in document:
            fail("schema", f'is missing, so this is not a {self.what} (expected "{self.schema}")')
        schema = document["schema"]
        if schema != self.schema:
            fail("schema", f'is {describe(schema)}, but this version of fcdp reads "{self.schema}"')
        self.check_text(text)
        values = {k: v for k, v in document.items() if k != "schema"}
        record: R = _record(self.record, values, "")
        self.check(record)
        return record


class _Repeated:
    """Stands for a JSON object with a repeated key, until the reader knows the object's path."""

    def __init__(self, key: str) -> None:
        self.key = key


def _plain(value: object) -> Any:
    """Turn records, tuples and enums into dicts, lists and strings."""
    if is_dataclass(value):
        given = [(f, getattr(value, f.name)) for f in fields(value)]
        return {f.name: _plain(v) for f, v in given if f.metadata != LATER or v != f.default}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _layout_text(value: Any, *, indent: int) -> str:
    """JSON text of `value`, on one line if it fits, else with one item on each line."""
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


def _parse(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_bounded_int)
    except RecursionError:
        raise Fault("", "is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise Fault("", f"is not JSON at {where} ({error.msg})") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object] | _Repeated:
    record = dict(pairs)
    return record if len(record) == len(pairs) else _Repeated(repeated_key(pairs))


def repeated_key(pairs: list[tuple[str, Any]]) -> str:
    """The key that most pairs have."""
    return Counter(key for key, _ in pairs).most_common(1)[0][0]


def _bounded_int(digits: str) -> int:
    """Read an integer; too many digits are not parsed, which is costly, but become -1 or MAX_INT + 1."""
    if len(digits) <= len(str(MAX_INT)):
        return int(digits)
    return -1 if digits.startswith("-") else MAX_INT + 1


def _record(cls: Any, value: object, path: str) -> Any:
    """Turn a value into a record by its type hints."""
    if isinstance(value, _Repeated):
        fail(_join(path, value.key), "appears twice")
    if not isinstance(value, dict):
        fail(path, f"is {describe(value)}, not an object")
    hints = _hints(cls)
    for f in fields(cls):
        if f.name not in value and f.metadata != LATER:
            fail(_join(path, f.name), "is missing")
    for key in value:
        if key not in hints:
            fail(_join(path, key), f"is not a field here; the fields are {', '.join(hints)}")
    values = {
        name: _read(hint, value[name], _join(path, name))
        for name, hint in hints.items()
        if name in value
    }
    try:
        return cls(**values)
    except ValueError as error:  # a strategy that does not exist, a link without bandwidth
        fail(path, f"is impossible: {error}")


def _read(hint: Any, value: object, path: str) -> Any:
    if hint is Any:
        return _read_any(value, path)
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
        return _record(hint, value, path)
    if issubclass(hint, Enum):
        return _read_enum(hint, value, path)
    return _SCALARS[hint](value, path)


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


def _read_any(value: object, path: str) -> object:
    """Read any JSON value, for the format's own checks; whole numbers beyond MAX_INT may be replaced ones."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, _Repeated):
            _fail_at_repeated(value, path)
    return value


def _fail_at_repeated(value: object, path: str) -> None:
    """Fail at the path of a repeated key; it is searched only now, as tracking millions of paths is slow."""
    if isinstance(value, _Repeated):
        fail(_join(path, value.key), "appears twice")
    if isinstance(value, dict):
        for key, item in value.items():
            _fail_at_repeated(item, _join(path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _fail_at_repeated(item, f"{path}[{i}]")


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


def _read_float(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        fail(path, f"is {describe(value)}, not a number")
    if not math.isfinite(value):
        fail(path, f"is {value}, which is not finite")
    return float(value)


_SCALARS = {int: _read_int, float: _read_float, bool: _read_bool, str: _read_str}


def _join(path: str, name: str) -> str:
    if not name.isidentifier() or len(name) > 40:
        return f"{path}[{describe(name)}]"
    return f"{path}.{name}" if path else name
