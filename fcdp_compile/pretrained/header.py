"""Read the header of a checkpoint's safetensors file, and compute a digest that tells two versions apart."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from fcdp_compile.errors import CheckpointError
from fcdp_compile.files.safetensors_header import LENGTH_BYTES, Stored, header_bytes, stored_tensors

_SAMPLED_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The tensors of a file by name, and a digest of its size, its header and a little of each tensor."""

    path: Path
    tensors: dict[str, Stored]
    digest: str


def read_header(path: Path) -> Header:
    """Read the header of a file; never more bytes than the file has.

    Raises: CheckpointError for anything but a whole safetensors file, OSError if it cannot be read.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path} is not a file")  # a pipe would wait for a writer
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = header_bytes(path, file.read(LENGTH_BYTES), size)
        raw = file.read(length)
        if len(raw) < length:
            raise CheckpointError(f"{path} was cut short while it was read")
        tensors = stored_tensors(path, raw, size)
        digest = hashlib.sha256(size.to_bytes(8, "little") + raw)
        for stored in tensors.values():
            digest.update(_sample(file.fileno(), stored))
    return Header(path=path, tensors=tensors, digest=digest.hexdigest())


def _sample(file: int, stored: Stored) -> bytes:
    """Return a few bytes from the middle of a tensor: two versions of a checkpoint may have equal headers."""
    return os.pread(
        file, min(_SAMPLED_BYTES, stored.size_bytes), stored.start + stored.size_bytes // 2
    )
