"""A job saved on one layout and loaded on another has every value, and trains on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.errors import CheckpointError
from tests.distributed.jobs_checkpoint import Job, assert_same
from tests.distributed.parity import whole
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

Whole = dict[str, Tensor]

PLACES: dict[str, tuple[int, int, list[str]]] = {
    "2x2": (2, 2, ["zero3", "fcdp", "mics", "ddp"]),
    "4x1": (4, 1, ["fcdp"]),
    "1x1": (1, 1, ["zero3"]),
    "3x1": (3, 1, ["fcdp", "ddp"]),
}
"""N, g and a sequence of strategies; each loads the checkpoint that the strategy before it saved."""


def _chain(mesh: DeviceMesh | None, folder: str, strategies: list[str], start: bool) -> Any:
    """Continue the job under each strategy; returns the whole values that the last one saved."""
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
    for i, strategy in enumerate(strategies):
        _leaves_frozen_out(mesh, folder, strategy, start=start and i == 0)
    return None


def _leaves_frozen_out(mesh: DeviceMesh | None, folder: str, strategy: str, *, start: bool) -> None:
    """The matrices are frozen, and equal in every job; the rest is trained, saved and loaded."""
    job = Job(mesh, strategy=strategy)
    matrices = {n: p for n, p in job.model.named_parameters() if p.ndim > 1}
    for parameter in matrices.values():
        parameter.requires_grad_(requires_grad=False)
    before = {n: whole(p) for n, p in matrices.items()}
    if not start:
        job.load(f"{folder}/trained")
        wanted: Whole = torch.load(f"{folder}/trained.pt")
        assert_same({n: v for n, v in job.values().items() if n in wanted}, wanted)
    job.train(1)
    job.save(f"{folder}/trained", frozen=False)
    assert_same({n: whole(p) for n, p in matrices.items()}, before)
    if job.rank == 0:
        trained = {n: v for n, v in job.values().items() if n not in matrices}
        torch.save({n: v for n, v in trained.items() if "running" not in n}, f"{folder}/trained.pt")
    else:
        job.values()  # gathers
    name, other = max(matrices.items(), key=lambda item: item[1].numel())
    with torch.no_grad():
        other.add_(1)
    with pytest.raises(CheckpointError, match=f"model.{name}") as refused:
        job.load(f"{folder}/trained")
    assert f"1 of the {len(matrices)} frozen parameters" in str(refused.value)


def _check(found: Whole, wanted: Whole, strategy: str) -> None:
    assert_same(found, {n: wanted[n] for n in found})
    assert len(found) > len(wanted) - 3, strategy


@pytest.mark.rare
def test_a_job_moves_over_layouts_and_strategies(tmp_path: Path) -> None:
    for i, (nodes, ranks_per_node, strategies) in enumerate(PLACES.values()):
        args = (str(tmp_path), strategies, i == 0)
        if (nodes, ranks_per_node) == (1, 1):
            _chain(None, *args)
        else:
            run(_chain, *args, nodes=nodes, ranks_per_node=ranks_per_node)
    saved = os.listdir(tmp_path / "saved")
    assert len(saved) == 2, f"older data was removed: {saved}"
