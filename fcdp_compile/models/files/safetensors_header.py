"""The tensors that the header of a safetensors file lists, checked against the file's size.

    8 bytes: length of the header | header, JSON: name → dtype, shape, byte range | the tensors' bytes

safetensors checks much of this too when it opens a file, but its errors name neither the file nor the tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fcdp_compile.errors import ArgumentError, CheckpointError
from fcdp_compile.models.files.safetensors_writer import DTYPES

LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()} | {"C64": torch.complex64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor in a file; start: the position of its first byte."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def header_bytes(path: Path, prefix: bytes, size: int) -> int:
    """The length of a header, from the first bytes of a file of `size` bytes.

    Raises: CheckpointError if the header would not fit into the file, or is longer than safetensors allows.
    """
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
        raise CheckpointError(
            f"{path} is truncated or no safetensors file: it has {size} bytes, its header alone would "
            f"have {length}"
        )
    if length > _MOST_HEADER_BYTES:
        raise CheckpointError(
            f"{path} has a header of {length} bytes, more than safetensors files have"
        )
    return length


def stored_tensors(path: Path, raw: bytes, size: int) -> dict[str, Stored]:
    """The tensors of a file of `size` bytes with this header, by name.

    Raises: CheckpointError, naming file and tensor, if the header is invalid or does not fit the size.
    """
    entries = _parsed(path, raw)
    base = LENGTH_BYTES + len(raw)
    tensors = {name: _stored(path, name, entry, base) for name, entry in entries.items()}
    _check_ranges(path, {n: entries[n]["data_offsets"] for n in tensors}, size - base)
    return tensors


def parse_json(path: Path, raw: bytes) -> Any:
    """Parse the JSON of a file, in which no object may have a name twice.

    Raises: CheckpointError.
    """
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        reason = str(error) or "nested too deep"
        raise CheckpointError(f"{path} is damaged, its JSON cannot be read: {reason}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ArgumentError(f"{twice!r} appears twice")
    return found


def _parsed(path: Path, raw: bytes) -> dict[str, dict[str, Any]]:
    header = parse_json(path, raw)
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _stored(path: Path, name: str, entry: Any, base: int) -> Stored:
    """One entry of a header as a record; its byte range is only checked against its own shape."""

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path} is damaged: {what} of tensor {name!r}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("the header does not give dtype, shape and data_offsets")
    dtype = _BY_NAME.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointError(
            f"{path}: tensor {name!r} has dtype {entry['dtype']!r}, which cannot be loaded; expected one of "
            f"{', '.join(_BY_NAME)}"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape):
        raise wrong(f"{str(shape)[:80]!r} is not the shape")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise wrong(f"{str(offsets)[:80]!r} is not the byte range")
    needed = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != needed:
        raise wrong(
            f"{entry['dtype']} {shape} needs {needed} bytes, which is not the range {offsets}"
        )
    return Stored(file=path, name=name, dtype=dtype, shape=tuple(shape), start=base + offsets[0])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _check_ranges(path: Path, ranges: dict[str, list[int]], size: int) -> None:
    """Check that the tensors follow each other without gaps and fill the file."""
    end = 0
    for name, (start, stop) in sorted(ranges.items(), key=lambda item: item[1]):
        if start != end:
            what = "overlaps the one before it" if start < end else "leaves a gap before it"
            raise CheckpointError(f"{path} is damaged: the range of tensor {name!r} {what}")
        end = stop
    if end > size:
        raise CheckpointError(
            f"{path} is truncated: its tensors need {end} bytes after the header, it has {size}"
        )
    if end < size:
        raise CheckpointError(f"{path} is damaged: {size - end} bytes follow its last tensor")
