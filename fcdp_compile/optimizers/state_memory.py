"""The memory in which an optimizer's states wait: pinned and booked host memory, or files.

A file has no name, so it is gone with its process, however the process ends.  Its space is reserved before
anything is moved, so a disk that is full is found then, and not by a write that kills the process.
Source: ZeRO-Infinity (Rajbhandari et al., 2021), section 5, for states on NVMe.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.optimizers.state_buckets import StateBucket
from fcdp_compile.ranks.all_or_none import together
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.model import ShardedModel


class StateMemory:
    """The memory of one optimizer's states.

    what: names the states, for errors.  folder: of the files; None: in host memory.
    """

    def __init__(self, what: str, model: ShardedModel, folder: Path | None) -> None:
        self._what = what
        self._folder = folder
        self._pool: PinnedPool = model.pool
        self._host: HostMemory = model.host_memory
        self._slabs: list[Tensor] = []
        self._booked_bytes = 0

    def take(self, buckets: Sequence[StateBucket], model: ShardedModel) -> None:
        """Give each bucket its memory; all ranks of the model must call it.

        Raises: FcdpError on every rank if any rank has no room; nothing is taken then.
        """
        size = sum(-(-b.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE for b in buckets)
        booked = 0
        if self._folder is None:
            booked = self._host.book(
                self._what, size, model.collectives, self._pool, is_pinned=model.device.registers
            )
        made: list[Tensor] = []
        try:
            together(
                model.topology.control,
                lambda: made.extend(map(self._slab, buckets)),
                FcdpError,
                f"the memory for {self._what}",
            )
        except FcdpError:
            self._host.unplanned_bytes -= booked
            self._release(made)
            raise
        self._booked_bytes += booked
        self._slabs += made
        for bucket, slab in zip(buckets, made, strict=True):
            bucket.put_on(slab)

    def end(self) -> None:
        """Give the memory back, because the optimizer is gone."""
        self._release(self._slabs)
        self._slabs = []
        self._host.freed_bytes += self._booked_bytes

    def _slab(self, bucket: StateBucket) -> Tensor:
        if not bucket.size_bytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._folder is None:
            return self._pool.take(bucket.size_bytes, torch.uint8)
        try:
            return _mapped(self._folder, bucket.size_bytes)
        except (OSError, ValueError) as error:  # ValueError: no system takes such a name
            raise FcdpError(
                f"cannot reserve {bucket.size_bytes} bytes for {self._what} in folder {str(self._folder)!r} "
                f"({getattr(error, 'strerror', error)}); choose a folder that exists, can be written to and "
                "has room"
            ) from error

    def _release(self, slabs: Sequence[Tensor]) -> None:
        for slab in slabs if self._folder is None else ():  # a file is gone with its last tensor
            if slab.numel():
                self._pool.give_back(slab)


def _mapped(folder: Path, size_bytes: int) -> Tensor:
    """A tensor of bytes in a new file without a name, whose space is reserved.

    Raises: OSError.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        mapping = mmap.mmap(file.fileno(), size_bytes)
    mapping.madvise(mmap.MADV_SEQUENTIAL)
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8)
