"""Under autocast, weights and gradients travel in the dtype of computation, with equal results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.backend import compilation
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.passes import reduce_grads
from fcdp_compile.plan import Direction
from fcdp_compile.runtime.collectives.counters import AGREE
from tests.distributed.cut_models import adamw, batch_of, llama
from tests.distributed.parity import Sharded, Trial, values
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

STEPS = 2
CASES = ("llama", "llama-lora")


class Trained(NamedTuple):
    """What training gave: losses, parameters, and the bytes of the last step by kind."""

    losses: list[float]
    parameters: dict[str, Tensor]
    moved: dict[str, int]


def _train(mesh: DeviceMesh | None, trial: Trial, *, is_narrow: bool) -> Trained:
    losses: list[float] = []
    with nullcontext() if is_narrow else _as_before():
        mine = Sharded(mesh, trial)
        for step in range(STEPS):
            ids = mine.batches(step)[mine.rank]
            # Steps in bf16 between evaluations in fp32, in bf16, and of the uncompiled model: each has values
            # of its own dtype.
            for net, autocast in ((mine.net, False), (mine.net, True), (mine.model, False)):
                with torch.no_grad(), _autocast() if autocast else nullcontext():
                    losses.append(mine.case.loss(net, ids).item())
            for _ in range(2):
                with _autocast():
                    loss = mine.loss(ids)
                loss.backward()
                mine.step()
                losses.append(loss.item())
        moved = dict(state_of(mine.model).transport.counters.last_step)
        if is_narrow and trial.case in CASES:
            _check_dtypes(mine.model)
        return Trained(losses, values(mine.model), moved)


@contextmanager
def _as_before() -> Iterator[None]:
    """Within it, all travels in the parameters' own dtype."""
    with (
        mock.patch.object(compilation, "narrow", lambda gm, but: gm),
        mock.patch.object(reduce_grads, "_crosses_as", return_value=False),
    ):
        yield


def _autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def _check_dtypes(model: Any) -> None:
    """Weights of linear layers are bf16 in graphs under autocast, norms and embeddings nowhere."""
    found: dict[str, set[str]] = {}
    for plan in state_of(model).plans.values():
        if any(s.direction is Direction.BACKWARD for s in plan.schedules):
            for bucket in plan.buckets:
                for param in bucket.params:
                    found.setdefault(param.name, set()).add(bucket.dtype)
    for name, dtypes in found.items():
        wide = "norm" in name or "embed" in name
        assert dtypes == {"float32" if wide else "bfloat16"}, name


def _check(mesh: DeviceMesh | None, trials: list[Trial]) -> None:
    for trial in trials:
        wide, low = (_train(mesh, trial, is_narrow=n) for n in (False, True))
        assert low.losses == wide.losses, trial
        assert all(map(torch.equal, low.parameters.values(), wide.parameters.values())), trial
        assert sum(low.moved.values()) < sum(wide.moved.values()), trial
        for line, wide_bytes in wide.moved.items():
            low_bytes = low.moved[line]
            if line in ("inter_reduce_scatter", AGREE):
                assert low_bytes == wide_bytes, (trial, line)
            elif wide_bytes and trial.case in CASES:
                assert wide_bytes / 2 <= low_bytes < 0.75 * wide_bytes, (trial, line)


def test_two_nodes_of_two() -> None:
    run(_check, [Trial(case="odd-lora")], nodes=2, ranks_per_node=2)


@pytest.mark.slow
def test_models_of_transformers() -> None:
    trials = [Trial(case=case) for case in CASES]
    run(_check, trials, nodes=2, ranks_per_node=2)


def _train_shared(kind: str, *, is_narrow: bool) -> Trained:
    """Ranks of a node share each batch: by tensor parallelism ("tp") or context parallelism ("cp")."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    whole = fcdp_compile.make_mesh(nodes=2, **{kind: 2})
    cut = fcdp_compile.tensor_parallel if kind == "tp" else fcdp_compile.context_parallel
    model = fcdp_compile.shard(cut(llama(), whole), whole)
    losses: list[float] = []
    with nullcontext() if is_narrow else _as_before():
        net: Any = torch.compile(model, backend="fcdp", options={"compute": "eager"})
        optimizer = adamw(model)
        for step in range(3):
            batch = batch_of(dist.get_rank() // 2, step, 16)
            if kind == "cp":
                batch = fcdp_compile.sequence_part(batch, whole)
            with _autocast():
                loss = net(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        moved = dict(state_of(model).transport.counters.last_step)
    return Trained(losses, values(model), moved)


def _check_shared(_mesh: DeviceMesh) -> None:
    for kind in ("tp", "cp"):
        wide, low = (_train_shared(kind, is_narrow=n) for n in (False, True))
        assert low.losses == wide.losses, kind
        assert all(map(torch.equal, low.parameters.values(), wide.parameters.values())), kind
        line = "inter_all_gather"
        assert wide.moved[line] / 2 <= low.moved[line] < 0.75 * wide.moved[line], kind


@pytest.mark.slow
def test_ranks_of_a_node_share_each_batch() -> None:
    run(_check_shared, nodes=2, ranks_per_node=2)
