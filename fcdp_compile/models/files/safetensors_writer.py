"""Write a safetensors file one tensor at a time, holding only this tensor in memory.

    8 bytes: length of the header | header, JSON: name → dtype, shape, byte range | the tensors' bytes

safetensors itself can only write tensors that are all in memory at once.  It is used to read files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from fcdp_compile.errors import ArgumentError

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
"""The format's names of dtypes."""

_ALIGNMENT = 8
_PIECE_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """The dtype and shape of a tensor, for the header of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFileWriter:
    """A safetensors file that is being written; complete and on disk after a `with` block without an error.

    tensors: all tensors that will be written, in that order.  metadata: strings for the header.  wrote:
    called with every piece of the file, header included, after the piece was given to the system.

    Raises: ValueError for a dtype that the format lacks; OSError if the file cannot be written.  After an
    error the file is left incomplete: its header lists more bytes than the file has.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, TensorMeta],
        metadata: Mapping[str, str] | None = None,
        wrote: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self._waiting = dict(tensors)
        self._wrote = wrote or (lambda piece: None)
        header = _header(tensors, metadata or {})
        self._file = self.path.open("xb", buffering=0)
        try:
            self._put(memoryview(header))
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor, which may be on any device.

        Raises: ValueError if it is not the next tensor, or if the header has another dtype or shape for it.
        """
        expected = next(iter(self._waiting), None)
        if name != expected:
            raise ArgumentError(f"{self.path}: the next tensor is {expected!r}, not {name!r}")
        meta = self._waiting.pop(name)
        if (tensor.dtype, tuple(tensor.shape)) != (meta.dtype, meta.shape):
            raise ArgumentError(
                f"{self.path}: {name!r} is {tensor.dtype} {tuple(tensor.shape)}, the header says "
                f"{meta.dtype} {meta.shape}"
            )
        if tensor.numel():
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
            for piece in raw.split(_PIECE_BYTES):
                self._put(memoryview(piece.cpu().numpy()))

    def _put(self, piece: memoryview) -> None:
        rest = piece
        while rest:
            rest = rest[self._file.write(rest) :]
        self._wrote(piece)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                if self._waiting:
                    raise ArgumentError(
                        f"{self.path}: {next(iter(self._waiting))!r} was never written"
                    )
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def _header(tensors: Mapping[str, TensorMeta], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, meta in tensors.items():
        if meta.dtype not in DTYPES:
            raise ArgumentError(f"{name!r} is {meta.dtype}, which safetensors files do not hold")
        start, end = end, end + meta.size_bytes
        entries[name] = {
            "dtype": DTYPES[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
