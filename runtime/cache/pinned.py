"""Host memory of exact size for node shards, registered with the device.

torch's own pinned allocator rounds every block up to a power of two, which for a whole model can double the
memory that a node needs.  A slab here is anonymous memory of whole pages, less than one page too large, in
huge pages where the system has them: registering touches each page first.  For a GiB that takes 0.5 s with
pages of 4 KiB and 0.1 to 0.2 s with huge ones (`mlock` on the machine of the benchmarks, memory free).
Its pages are on the NUMA node of the thread that registers it, which is the first to touch them: on the
GPU's NUMA node if the launcher has bound the process to that node's cores.

[Note: life of a slab]
The caller of `take` owns the slab until `give_back`, or until the pool dies.  After that, its memory is
unregistered and unmapped when the last tensor on it dies, never earlier: a tensor that outlives the pool
stays valid.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import weakref

import torch
from torch import Tensor

from fcdp_compile.devices import Device
from fcdp_compile.errors import ArgumentError

log = logging.getLogger(__name__)

_HUGE = 1 << 21
"""The size of a huge page, on most machines."""


class PinnedPool:
    """The slabs of one model on this rank; plain memory if the device needs no registered memory."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slabs: dict[int, int] = {}  # sizes by address
        self._has_warned = False

    @property
    def slab_bytes(self) -> int:
        """Bytes of all slabs that were taken and not given back, in whole pages."""
        return sum(self._slabs.values())

    def take(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor on a new slab; its values are undefined."""
        size = elements * dtype.itemsize
        slab_bytes = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = _Memory(slab_bytes)
        if why := memory.register(self._device):
            self._warn(slab_bytes, why)
        # Evaluation may run under inference_mode, and a tensor made there cannot be written elsewhere.
        with torch.inference_mode(False):
            slab = torch.frombuffer(memory.buffer, dtype=torch.uint8)[:size].view(dtype)
        self._slabs[memory.address] = slab_bytes
        return slab

    def give_back(self, slab: Tensor) -> None:
        """End the ownership of a slab; see [Note: life of a slab].

        Raises: ValueError if it is not a slab of this pool, or was given back before.
        """
        address = slab.untyped_storage().data_ptr()
        if address not in self._slabs:
            raise ArgumentError(
                f"a tensor of {slab.nbytes} bytes is not a slab of this pool, or was given back before; "
                "give back what `take` returned, once"
            )
        del self._slabs[address]

    def can_register(self, slab_bytes: int) -> bool:
        """Try whether this process may register that many bytes; nothing stays registered."""
        return not _Memory(slab_bytes).register(self._device)

    def _warn(self, slab_bytes: int, why: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "could not register %d bytes of host memory with the device (%s); the memory is used "
            "unregistered: same numbers, slower copies; raise the limit of locked memory (ulimit -l) or set "
            "options={'host_memory': …} lower",
            slab_bytes,
            why,
        )


class _Memory:
    """One anonymous mapping; lives as long as `buffer`, which tensors on it hold."""

    def __init__(self, slab_bytes: int) -> None:
        # Private: shared memory is counted and limited as files of /dev/shm are.
        mapping = mmap.mmap(-1, slab_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if slab_bytes >= _HUGE:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self.buffer = (ctypes.c_char * slab_bytes).from_buffer(mapping)
        self.address = ctypes.addressof(self.buffer)
        self._mapping = mapping

    def register(self, device: Device) -> str:
        """Register the memory until `buffer` dies; return why that is impossible, or nothing."""
        if not device.registers:
            return ""
        if why := device.register(self.address, len(self._mapping)):
            return why
        # A forked child, such as a data loader's worker, must not make the kernel copy pages that the GPU
        # writes to.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        # Not at exit, when the device's context may be gone: the end of the process releases everything.
        weakref.finalize(self.buffer, device.unregister, self.address).atexit = False
        return ""
