"""safetensors files: write one, and find the tensors of one by its header, checked against the file's size.

    8 bytes: length of the header | header, JSON: name → dtype, shape, byte range | the tensors' bytes

safetensors itself writes only tensors that are all in host memory at once.  It checks much of the header when
it opens a file, but its errors name neither the file nor the tensor.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcdp_compile.errors import ArgumentError, CheckpointError
from fcdp_compile.models.files.json_records import repeated_key

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes that we write."""
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()} | {"C64": torch.complex64}

_LENGTH_BYTES = 8
_ALIGNMENT = 8
_PIECE_BYTES = 2**24
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    wrote: Callable[[memoryview], None] = lambda piece: None,
) -> None:
    """Write a new file and sync it to the disk; at most one tensor is copied at a time.

    tensors: on any device, in the order of the file.  metadata: strings for the header.  wrote: called with
    every piece of the file, header included, after the piece was given to the system.

    Raises: ValueError for a dtype that the format lacks; OSError if the file cannot be written.  After an
    error the file is left incomplete: its header lists more bytes than the file has.
    """
    header = _header(tensors, metadata or {})
    with path.open("xb", buffering=0) as file:

        def put(piece: memoryview) -> None:
            rest = piece
            while rest:
                rest = rest[file.write(rest) :]
            wrote(piece)

        put(memoryview(header))
        for tensor in tensors.values():
            if tensor.numel():
                for piece in as_bytes(tensor).split(_PIECE_BYTES):
                    put(memoryview(piece.cpu().numpy()))
        os.fsync(file.fileno())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a tensor of one dimension."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ArgumentError(f"{name!r} is {tensor.dtype}, which safetensors files do not hold")
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


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


def stored_tensors(
    path: Path, size: int, read: Callable[[int, int], bytes]
) -> tuple[dict[str, Stored], bytes]:
    """Read the header of a file of `size` bytes; return its tensors by name, and the header itself.

    read: returns the bytes of the file from one position to another; never called beyond the size.

    Raises: CheckpointError, naming file and tensor, if the header is invalid or does not fit the size.
    """
    length = int.from_bytes(read(0, min(_LENGTH_BYTES, size)), "little")
    base = _LENGTH_BYTES + length
    if base > size:
        raise CheckpointError(
            f"{path} is truncated or no safetensors file: it has {size} bytes, its header alone would "
            f"have {length}"
        )
    if length > _MOST_HEADER_BYTES:
        raise CheckpointError(
            f"{path} has a header of {length} bytes, more than safetensors files have"
        )
    raw = read(_LENGTH_BYTES, base)
    if len(raw) < length:
        raise CheckpointError(f"{path} was cut short while it was read")
    entries = parse_json(path, raw)
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object")
    entries.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, base) for name, entry in entries.items()}
    _check_ranges(path, {n: entries[n]["data_offsets"] for n in tensors}, size - base)
    return tensors, raw


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
        raise ArgumentError(f"{repeated_key(pairs)!r} appears twice")
    return found


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
