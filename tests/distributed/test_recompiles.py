"""Varying sequence lengths, evaluations, deleted models: what fcdp compiles, and what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import optimizer as torch_optimizer

from fcdp_compile.core.sharding.shard import state_of
from tests.distributed.models import batch
from tests.distributed.parity import (
    GRADIENT_FLOOR,
    PARAMETER_FLOOR,
    RELATIVE,
    Replica,
    Sharded,
    Trial,
    check_close,
    fresh,
    gradients,
    values,
)
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

LENGTHS = [[16, 16, 16, 16], [24, 24, 24, 24], [9, 9, 9, 9], [31, 31, 31, 31]]
UNEQUAL_LENGTHS = [[16, 16, 16, 16], [16, 24, 16, 16], [9, 24, 16, 31], [31, 9, 9, 12], [20] * 4]
"""By step and rank: rank 1 gets a second length before the others."""


def _plans(folder: Path) -> int:
    return len(list(folder.glob("*.plan.json")))


def _train(
    mesh: DeviceMesh | None, name: str, lengths: list[list[int]], folder: Path, strategy: str
) -> list[int]:
    """Train with these lengths and compare; returns the graphs after each step and evaluation."""
    dump = folder / f"{name}-{strategy}"
    mine = Sharded(mesh, Trial(case=name, strategy=strategy), options={"dump": dump})
    model, case, rank = mine.model, mine.case, mine.rank
    replica = Replica(mine.plain, case.loss)
    counts = []
    for step, by_rank in enumerate(lengths):
        batches = [batch(case, step=step, rank=r, length=by_rank[r]) for r in range(mine.ranks)]
        loss = mine.loss(batches[rank])
        loss.backward()
        expected = replica.backward(batches)[rank]
        assert abs(loss.item() - expected) <= RELATIVE * expected, f"{name}, step {step}"
        check_close(name, gradients(model), gradients(replica.model), floor=GRADIENT_FLOOR)
        mine.step()
        replica.step()
        counts.append(len(state_of(model).plans))
    check_close(name, values(model), values(replica.model), floor=PARAMETER_FLOOR)
    for length in (16, 24, 9):
        ids = batch(case, step=100, rank=rank, length=length)
        with torch.no_grad():
            expected = case.loss(replica.model, ids).item()
            assert abs(mine.loss(ids).item() - expected) <= RELATIVE * expected
        counts.append(len(state_of(model).plans))
    if rank == 0:
        assert counts[-1] == _plans(dump)
    return counts


def _train_each(mesh: DeviceMesh | None, names: list[str], *args: Any) -> list[list[int]]:
    return [_train(mesh, name, *args) for name in names]


@pytest.mark.parametrize(
    ("names", "strategy"),
    [(["odd", "odd-lora"], "fcdp"), (["odd"], "zero++")],
)
@pytest.mark.slow
def test_lengths_recompile_at_most_once(tmp_path: Path, names: list[str], strategy: str) -> None:
    ranks = run(_train_each, names, LENGTHS, tmp_path, strategy, nodes=2, ranks_per_node=1)
    for name, counts in ((n, c) for of_rank in ranks for n, c in zip(names, of_rank, strict=True)):
        assert counts == [1, 2, 2, 2, 3, 3, 3], f"{name}: graphs after each step {counts}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "strategy", "ranks_per_node"),
    [pytest.param(["llama-lora"], "fcdp", 1, marks=pytest.mark.rare), (["odd"], "zero3", 2)],
)
def test_ranks_may_recompile_in_different_steps(
    tmp_path: Path, names: list[str], strategy: str, ranks_per_node: int
) -> None:
    ranks = run(
        _train_each, names, UNEQUAL_LENGTHS, tmp_path, strategy,
        nodes=2, ranks_per_node=ranks_per_node,
    )  # fmt: skip
    for name, counts in ((n, c) for of_rank in ranks for n, c in zip(names, of_rank, strict=True)):
        assert counts[-1] <= 3, f"{name}: graphs after each step {counts}"


def _train_and_forget(mesh: DeviceMesh | None, name: str, compute: str | None) -> None:
    fresh()  # drops what earlier tests left in this process
    hooks = len(torch_optimizer._global_optimizer_post_hooks)
    state = _train_once(mesh, name, compute)
    fresh()
    gc.collect()
    assert state() is None, f"still referred to by {gc.get_referrers(state())}"
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks


def _train_once(mesh: DeviceMesh | None, name: str, compute: str | None) -> weakref.ref[Any]:
    mine = Sharded(mesh, Trial(case=name, compute=compute))
    for step in range(2):
        mine.loss(mine.batches(step)[mine.rank]).backward()
        mine.step()
    return weakref.ref(state_of(mine.model))


@pytest.mark.parametrize("compute", ["eager", None])
def test_a_dead_model_leaves_nothing(compute: str | None) -> None:
    run(_train_and_forget, "odd", compute, nodes=2, ranks_per_node=1)


def test_a_dead_model_leaves_nothing_in_one_process() -> None:
    _train_and_forget(None, "odd", "eager")
