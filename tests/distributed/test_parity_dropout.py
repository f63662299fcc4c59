"""With dropout: the same random numbers as the same model under torch's own `aot_eager`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from tests.distributed.models import CASES, batch
from tests.distributed.parity import (
    GRADIENT_FLOOR,
    PARAMETER_FLOOR,
    RELATIVE,
    Trial,
    adamw,
    build,
    check_close,
    compile_with,
    fresh,
    gradients,
    rank_and_ranks,
    values,
)
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


def _check(mesh: DeviceMesh | None, is_checkpointed: bool) -> None:
    fresh()
    case = CASES["gpt2-dropout"]
    rank, ranks = rank_and_ranks(mesh)
    model = build(Trial(case="gpt2-dropout", is_checkpointed=is_checkpointed))
    plain = copy.deepcopy(model)
    nets: list[Any] = [torch.compile(plain, backend="aot_eager")]
    fcdp_compile.shard(model, mesh)
    nets.append(compile_with(model, "eager"))
    optimizers = [adamw(plain), adamw(model)]
    for step in range(8):
        ids = batch(case, step=step, rank=rank)
        losses = []
        for net in nets:
            # Only the forward's seed is set: a backward that recomputes must restore the state by itself.
            torch.manual_seed(100 * step + rank)
            loss = case.loss(net, ids)
            torch.manual_seed(12345)
            loss.backward()
            losses.append(loss.item())
        for parameter in plain.parameters():
            if ranks > 1 and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
        about = f"checkpointed={is_checkpointed}, step {step}"
        assert abs(losses[1] - losses[0]) <= RELATIVE * abs(losses[0]), f"{about}: {losses}"
        check_close(about, gradients(model), gradients(plain), floor=GRADIENT_FLOOR)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_close("at last", values(model), values(plain), floor=PARAMETER_FLOOR)
    _check_that_dropout_drops(case, nets[1], ids)


def _check_that_dropout_drops(case: Any, net: Any, ids: torch.Tensor) -> None:
    """The control: another seed gives another loss."""
    losses = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.add(case.loss(net, ids).item())
    assert len(losses) == 2


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_one_process(is_checkpointed: bool) -> None:
    _check(None, is_checkpointed)


def test_two_nodes_of_two() -> None:
    run(_check, True, nodes=2, ranks_per_node=2)
