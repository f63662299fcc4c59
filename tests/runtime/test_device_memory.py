"""When a device counts as full."""

from __future__ import annotations

import pytest
import torch

from fcdp_compile.devices import Cpu, Cuda, current_device
from fcdp_compile.runtime.cache.device_memory import DeviceMemory

CPU = torch.device("cpu")


@pytest.mark.parametrize(("used", "is_short"), [(0, False), (90, False), (91, True), (1000, True)])
def test_short_above_the_threshold(used: int, is_short: bool) -> None:
    memory = DeviceMemory(capacity_bytes=100, threshold=0.9, used_bytes=lambda: used)
    assert memory.is_short() == is_short


def test_few_looks_answer_many_questions_while_there_is_room() -> None:
    looks, used = [0], [50]

    def look() -> int:
        looks[0] += 1
        return used[0]

    memory = DeviceMemory(capacity_bytes=100, threshold=0.9, used_bytes=look)
    assert [memory.is_short() for _ in range(320)] == [False] * 320
    assert looks == [20]
    used[0] = 95
    assert [memory.is_short() for _ in range(3)] == [True] * 3
    used[0] = 50  # the memory in question is free again
    assert not memory.is_short()
    assert looks == [24]


def test_a_cpu_has_no_memory_for_a_cache_unless_told() -> None:
    assert DeviceMemory.of(Cpu(), capacity_bytes=None, threshold=0.9) is None
    told = DeviceMemory.of(Cpu(), capacity_bytes=10, threshold=0.9)
    assert told is not None
    assert (told.capacity_bytes, told.is_short(), Cpu().peak_bytes()) == (10, False, None)


def test_what_others_use_on_a_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 bytes 20 are free, and torch keeps 5 for tensors to come: others use 50, this process 25."""
    figures = {"reserved_bytes": 30, "allocated_bytes": 25}
    stats = {of: {"all": {"current": n}} for of, n in figures.items()}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (20, 100))
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    assert Cuda(torch.device("cuda", 0)).used_bytes() == 75


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_says_itself() -> None:
    device = current_device()
    memory = DeviceMemory.of(device, capacity_bytes=None, threshold=0.9)
    assert memory is not None
    assert memory.capacity_bytes == torch.cuda.get_device_properties(device.torch).total_memory
    told = DeviceMemory.of(device, capacity_bytes=1 << 20, threshold=1.0)
    assert told is not None
    kept = torch.empty(2 << 20, dtype=torch.uint8, device=device.torch)
    assert told.is_short()
    assert (device.peak_bytes() or 0) >= kept.nbytes
