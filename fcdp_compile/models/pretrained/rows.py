"""Reads other nodes' rows from a checkpoint that was loaded (`runtime.row_sources`)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.models.pretrained.source import Files, Source, fill_boxes

_REMOTE = (
    "9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
    "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
)  # fmt: skip
"""File systems whose files may be on another machine; all kinds of fuse count as such."""


class CheckpointRows:
    """Home shards read from a checkpoint, by the parameters' keys; files stay open until `close`."""

    def __init__(self, sources: Mapping[str, tuple[ParamSpec, Source]]) -> None:
        self._sources = sources
        self._files = Files()

    @property
    def keys(self) -> list[str]:
        """The keys of the parameters in the checkpoint."""
        return list(self._sources)

    def read(self, key: str, node: int, place: int) -> Tensor:
        """Read the home shard of the rank at a place of a node."""
        spec, source = self._sources[key]
        shape = spec.layout.local_shape(node, place)
        out = torch.empty(shape, dtype=spec.home_dtype, device="cpu")
        fill_boxes(out, spec.boxes(node, place), source, self._files)
        return out

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def is_local(path: Path, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether a file is on a disk of this machine; False if the system does not tell.

    Reading rows over a network would not save the traffic of gathering them.

    mounts: the system's list of file systems.
    """
    try:
        mounted = mounts.read_bytes().splitlines()
        place = path.resolve(strict=True)
    except OSError:
        return False
    best, kind = -1, "nfs"
    for line in mounted:
        _, where, of, *_ = line.split(b" ")
        # The list has blanks and similar characters as octal numbers.
        name = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), where)
        point = Path(os.fsdecode(name))
        if len(point.parts) >= best and (point == place or point in place.parents):
            best, kind = len(point.parts), os.fsdecode(of)
    return kind not in _REMOTE and not kind.startswith("fuse.")
