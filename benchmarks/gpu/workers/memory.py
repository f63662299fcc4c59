"""The peak of the memory that one process takes on a device: CUDA's own count; on a CPU, the heap's."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.running.memory import HeapPeak, heap_bytes


@dataclass(slots=True)
class Peak:
    """Filled when the block ends."""

    bytes: int = 0


def used_bytes(device: torch.device) -> int:
    """What is allocated now."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else heap_bytes()


@contextlib.contextmanager
def peak_over(baseline_bytes: int, device: torch.device) -> Iterator[Peak]:
    """How far the memory rises above a baseline inside the block."""
    found = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.bytes = torch.cuda.max_memory_allocated(device) - baseline_bytes
        return
    with HeapPeak() as heap:
        yield found
    found.bytes = heap.bytes - baseline_bytes
