"""A job is saved on one layout and loaded on another: every value is there, and it trains on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.jobs_checkpoint import Job, assert_same
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

Whole = dict[str, Tensor]

PLACES: dict[str, tuple[int, int, list[str]]] = {
    "2x2": (2, 2, ["zero3", "fcdp", "mics", "ddp"]),
    "4x1": (4, 1, ["fcdp"]),
    "1x1": (1, 1, ["zero3"]),
    "3x1": (3, 1, ["fcdp", "ddp"]),
}
"""N, g and the strategies, one after the other; each loads what the one before has saved."""


def _chain(mesh: DeviceMesh | None, folder: str, strategies: list[str], start: bool) -> Any:
    """Continue the job under each strategy; the whole values that the last has saved, by rank."""
    wanted: Whole = torch.load(f"{folder}/wanted.pt") if not start else {}
    for i, strategy in enumerate(strategies):
        job = Job(mesh, strategy=strategy)
        if i or not start:
            loaded = job.load(f"{folder}/saved")
            assert loaded.step == job.position.given
            found = job.values()
            buffers = [n for n in wanted if "normalised.running" in n]
            _check({n: v for n, v in found.items() if n not in buffers}, wanted, strategy)
            assert job.optimizer.param_groups[0]["lr"] < 1e-2, "of the scheduler"
        job.train(2)
        job.save(f"{folder}/saved")
        wanted = job.values()
    if job.rank == 0:
        torch.save(wanted, f"{folder}/wanted.pt")
    return None


def _check(found: Whole, wanted: Whole, strategy: str) -> None:
    assert_same(found, {n: wanted[n] for n in found})
    assert len(found) > len(wanted) - 3, strategy


def test_a_job_moves_over_layouts_and_strategies(tmp_path: Path) -> None:
    for i, (nodes, ranks_per_node, strategies) in enumerate(PLACES.values()):
        args = (str(tmp_path), strategies, i == 0)
        if (nodes, ranks_per_node) == (1, 1):
            _chain(None, *args)
        else:
            run(_chain, *args, nodes=nodes, ranks_per_node=ranks_per_node)
    saved = os.listdir(tmp_path / "saved")
    assert len(saved) == 2, f"older data was removed: {saved}"
