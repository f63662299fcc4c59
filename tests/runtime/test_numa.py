"""NUMA nodes, on made-up /sys trees."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fcdp_compile
from fcdp_compile.devices import Cpu
from fcdp_compile.runtime.cache import numa
from fcdp_compile.runtime.cache.pinned import PinnedPool

GPU = "0000:3b:00.0"


def tree(root: Path, nodes: dict[int, str], *, gpu: str | None = "1", online: str = "0-7") -> Path:
    """A /sys with the cores of each node and a GPU at a node."""
    files = {"devices/system/cpu/online": online}
    if nodes:
        files["devices/system/node/online"] = ",".join(map(str, nodes))
    files |= {f"devices/system/node/node{n}/cpulist": cores for n, cores in nodes.items()}
    if gpu is not None:
        files[f"bus/pci/devices/{GPU}/numa_node"] = gpu
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


TWO = {0: "0-3", 1: "4-7"}


@pytest.mark.parametrize(
    ("nodes", "gpu", "expected"),
    [
        (TWO, "1", 1),
        (TWO, "0", 0),
        (TWO, "-1", None),  # the firmware does not say
        (TWO, "2", None),
        (TWO, None, None),
        ({0: "0-7"}, "0", None),  # the only one
        ({}, "0", None),
    ],
)
def test_the_node_of_a_gpu(
    tmp_path: Path, nodes: dict[int, str], gpu: str | None, expected: int | None
) -> None:
    root = tree(tmp_path, nodes, gpu=gpu)
    assert numa.node_of_pci(GPU, sys_root=root) == expected
    assert numa.node_of_pci(GPU.upper(), sys_root=root) == expected
    assert numa.node_of_pci("0000:00:00.0", sys_root=root) is None


def test_a_cpu_device_has_no_node(tmp_path: Path) -> None:
    assert numa.node_of(Cpu(), sys_root=tree(tmp_path, TWO)) is None


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("", []), ("0", [0]), ("0-3", [0, 1, 2, 3]), ("0-1,8,10-11", [0, 1, 8, 10, 11])],
)
def test_lists_of_the_kernel(text: str, numbers: list[int]) -> None:
    assert sorted(numa.parse_list(text)) == numbers


def test_the_cores_of_a_node(tmp_path: Path) -> None:
    root = tree(tmp_path, {0: "0-1,4-5", 1: "2-3,6-7", 2: ""})
    assert numa.cores_of(1, sys_root=root) == {2, 3, 6, 7}
    assert numa.cores_of(2, sys_root=root) == numa.cores_of(9, sys_root=root) == frozenset()


class Affinity:
    """Stands for the kernel: threads 10, 11 and 12, of which 12 has ended and 11 may be bound before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.of: dict[int, set[int]] = {t: set(range(8)) for t in (10, 11)}
        self.tasks = tmp_path / "task"
        for thread in (10, 11, 12):
            (self.tasks / str(thread)).mkdir(parents=True)
        monkeypatch.setattr(os, "sched_getaffinity", self.get)
        monkeypatch.setattr(os, "sched_setaffinity", self.set)

    def get(self, thread: int) -> set[int]:
        if thread == 12:
            raise ProcessLookupError
        return self.of[thread or 10]

    def set(self, thread: int, cores: frozenset[int]) -> None:
        self.of[thread] = set(cores)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Affinity:
    return Affinity(monkeypatch, tmp_path)


def test_every_thread_is_bound_to_the_cores_of_the_node(kernel: Affinity, tmp_path: Path) -> None:
    root = tree(tmp_path / "sys", TWO)
    assert numa.bind_process(1, sys_root=root, tasks=kernel.tasks)
    assert kernel.of == {10: {4, 5, 6, 7}, 11: {4, 5, 6, 7}}


def test_what_somebody_bound_before_stays(kernel: Affinity, tmp_path: Path) -> None:
    root = tree(tmp_path / "sys", TWO)
    kernel.of[11] = {0}
    assert numa.bind_process(1, sys_root=root, tasks=kernel.tasks)
    assert kernel.of == {10: {4, 5, 6, 7}, 11: {0}}
    assert not numa.bind_process(0, sys_root=root, tasks=kernel.tasks)
    assert kernel.of == {10: {4, 5, 6, 7}, 11: {0}}


@pytest.mark.parametrize(
    ("nodes", "node"), [(TWO, None), ({0: "0-7"}, 0), ({}, 0), ({0: "0-7", 1: ""}, 1), (TWO, 5)]
)
def test_nothing_is_bound_where_there_is_no_choice(
    kernel: Affinity, tmp_path: Path, nodes: dict[int, str], node: int | None
) -> None:
    root = tree(tmp_path / "sys", nodes)
    assert not numa.bind_process(node, sys_root=root, tasks=kernel.tasks)
    assert kernel.of[10] == set(range(8))


def test_shard_binds_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int | None] = []
    monkeypatch.setattr(numa, "node_of", lambda device: 1)
    monkeypatch.setattr(numa, "bind_process", bound.append)
    fcdp_compile.shard(nn.Linear(2, 2), bind_cores=False)
    assert bound == []
    fcdp_compile.shard(nn.Linear(2, 2))
    assert bound == [1]


def test_a_slab_prefers_the_node_it_was_made_for() -> None:
    """Read back from the kernel, with the real system call."""
    plain, bound = PinnedPool(Cpu()), PinnedPool(Cpu(), numa_node=0)
    slabs = [pool.take(100_000, torch.uint8).fill_(1) for pool in (plain, bound)]
    maps = Path("/proc/self/numa_maps")
    if not numa.bind_memory(slabs[1].data_ptr(), 4096, 0) or not maps.exists():
        pytest.skip("this kernel has no mbind, or does not allow it, or has no numa_maps")
    policies = dict(re.findall(r"^([0-9a-f]+) (\S+)", maps.read_text(), re.MULTILINE))
    assert policies.get(f"{slabs[1].data_ptr():x}") == "prefer:0"
    assert policies.get(f"{slabs[0].data_ptr():x}", "default") == "default"


def test_a_node_that_does_not_exist_changes_nothing() -> None:
    slab = PinnedPool(Cpu(), numa_node=900).take(10, torch.float32)
    assert slab.fill_(2).sum() == 20
    assert not numa.bind_memory(slab.data_ptr(), 4096, -1)
    assert not numa.bind_memory(slab.data_ptr(), 4096, 5000)
