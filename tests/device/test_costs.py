"""What is expensive on a device with streams: copies to pageable memory, and memory of other streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.core.params.seals import fingerprints
from tests.distributed.ranks import run
from tests.distributed.test_checkpoint import shared_folder

pytestmark = pytest.mark.distributed


class _Job:
    def __init__(self, mesh: DeviceMesh, strategy: str, **options: Any) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
        self.model[1].requires_grad_(False)
        fcdp_compile.shard(self.model, mesh, strategy=strategy, **options)
        self.net = torch.compile(
            self.model, backend="fcdp", options={"compute": "eager", "bucket_mb": 0.002}
        )
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def step(self) -> None:
        loss: Tensor = self.net(torch.ones(2, 24)).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _costs(act: Callable[[], object]) -> tuple[int, int]:
    """The copies to or from memory that is not pinned, and the bytes from other streams than compute's."""
    from tests.device.build import extension

    sim = extension()
    before = sim.counts()["pageable_copies"], sim.memory()["aside"]
    act()
    torch.accelerator.synchronize()
    return sim.counts()["pageable_copies"] - before[0], sim.memory()["aside"] - before[1]


_NARROW: dict[str, Any] = {"param_dtype": torch.bfloat16}
_CASES: dict[str, dict[str, Any]] = {
    "fcdp": _NARROW,
    "zero3": {"offload_params": True},
    "mics": {},
    "ddp": _NARROW,
    "zero3+ho_ring": _NARROW,
}


def _scratch_of_a_fingerprint() -> int:
    """The device memory in bytes that the fingerprint of a large tensor takes besides the tensor."""
    from tests.device.build import extension

    large = torch.zeros(3 * 2**23)
    torch.accelerator.synchronize()
    extension().reset_peak()
    before = extension().memory()["used"]
    fingerprints([[large]])
    return int(extension().memory()["peak"] - before)


def _all(mesh: DeviceMesh) -> dict[str, tuple[int, int]]:
    found = {}
    for strategy, more in _CASES.items():
        job = _Job(mesh, strategy, **more)
        for _ in range(2):
            job.step()
        found[strategy] = _costs(job.step)
    job = _Job(mesh, "fcdp")
    job.step()
    with shared_folder() as folder:

        def save() -> None:
            fcdp_compile.save(
                folder, model=job.model, optimizer=job.optimizer, asynchronous=True
            ).wait()

        found["saved"] = _costs(save)
    pageable = torch.empty(9, device="cpu")
    found["the control"] = _costs(lambda: pageable.copy_(torch.ones(9), non_blocking=True))
    if not dist.get_rank():
        assert 0 < _scratch_of_a_fingerprint() < 40 * 2**20, "two blocks of 16 MiB"
    return found


@pytest.mark.slow
def test_steps_and_saves_copy_nothing_to_pageable_memory_and_lanes_keep_none() -> None:
    for found in run(_all, nodes=2, ranks_per_node=2):
        assert found.pop("the control") == (1, 0)
        assert {name: costs for name, costs in found.items() if costs != (0, 0)} == {}
