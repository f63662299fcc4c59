"""The peak memory of one process: on a device as torch's allocator counts it, on a CPU the heap's peak."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.running.memory import HeapPeak, heap_bytes


@dataclass(slots=True)
class Peak:
    """The peak of a `with` block, set when the block ends."""

    bytes: int = 0


def used_bytes(device: torch.device) -> int:
    """Return the bytes allocated now."""
    gc.collect()
    if device.type == "cpu":
        return heap_bytes()
    return int(torch.get_device_module(device).memory_allocated(device))


@contextlib.contextmanager
def peak_over(baseline_bytes: int, device: torch.device) -> Iterator[Peak]:
    """Measure how far the memory rises above a baseline within the block."""
    found = Peak()
    if device.type != "cpu":
        counts = torch.get_device_module(device)
        counts.reset_peak_memory_stats(device)
        yield found
        found.bytes = counts.max_memory_allocated(device) - baseline_bytes
        return
    with HeapPeak() as heap:
        yield found
    found.bytes = heap.bytes - baseline_bytes
