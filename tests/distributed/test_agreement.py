"""If ranks disagree, every rank stops with a readable difference, and none hangs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.errors import FcdpError, PlanMismatchError
from tests.distributed.beside import whole
from tests.distributed.jobs import message_of
from tests.distributed.models import CASES, batch
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


def _different_plans(mesh: DeviceMesh) -> list[str]:
    messages = []
    case, rank = CASES["odd"], dist.get_rank()
    for strategy in ("zero3", "zero++", "fcdp"):
        torch._dynamo.reset()
        model = fcdp_compile.shard(case.model(), mesh, strategy=strategy)
        options = {"bucket_mb": 0.0003 if rank == 1 else 1.0}
        net = torch.compile(model, backend="fcdp", options=options)
        ids = batch(case, step=0, rank=rank)
        messages.append(message_of(PlanMismatchError, lambda: case.loss(net, ids).backward()))  # noqa: B023
    # The ranks are still in step: the next collective works.
    dist.barrier()
    return messages


def test_different_plans_stop_before_the_first_step() -> None:
    for messages in run(_different_plans, nodes=2, ranks_per_node=1):
        for message in messages:
            assert message.startswith("ranks 0 and 1 compiled different plans; make every rank run")
            lines = message.splitlines()[1:]
            assert lines, "and how they differ"
            assert any("rank 0" in line and "rank 1" in line for line in lines), message
            assert any("bucket" in line for line in lines), message


def _frozen_on_one_rank(mesh: DeviceMesh) -> str:
    case = CASES["odd"]
    model = fcdp_compile.shard(case.model(), mesh)
    net = torch.compile(model, backend="fcdp")
    ids = batch(case, step=0, rank=dist.get_rank())
    case.loss(net, ids).backward()
    if dist.get_rank() == 2:
        model.first.weight.requires_grad_(False)
    return message_of(FcdpError, lambda: case.loss(net, ids).backward())


@pytest.mark.slow
def test_freezing_on_one_rank_alone_is_found_before_the_next_step() -> None:
    for message in run(_frozen_on_one_rank, nodes=2, ranks_per_node=2):
        assert message.startswith("ranks 0 and 2 compiled different plans")
        assert "rank 2" in message.split("\n", 1)[1]


class _Deep(nn.Module):
    def __init__(self, layers: int, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(layers))


def _different_models(mesh: DeviceMesh) -> list[str]:
    odd_one = dist.get_rank() == 3
    frozen = _Deep(3)
    frozen.layers[1].weight.requires_grad_(not odd_one)
    trials: list[tuple[nn.Module, dict[str, Any]]] = [
        (_Deep(3 if odd_one else 4), {}),
        (_Deep(3, dtype=torch.float64 if odd_one else torch.float32), {}),
        (frozen, {}),
        (_Deep(3), {"strategy": "zero3" if odd_one else "fcdp"}),
        (_Deep(3), {"param_dtype": torch.bfloat16 if odd_one else None}),
    ]
    messages = [
        message_of(ValueError, lambda: fcdp_compile.shard(model, mesh, **options))  # noqa: B023
        for model, options in trials
    ]
    dist.barrier()
    return messages


def test_different_models_are_not_sharded() -> None:
    expected = ["layers.3", "float64", "requires_grad=False", "zero3", "bfloat16"]
    for messages in run(_different_models, nodes=2, ranks_per_node=2):
        for message, what in zip(messages, expected, strict=True):
            assert message.startswith(
                "ranks 0 and 3 are about to shard different models; build the"
            )
            assert what in message


def _different_values(mesh: DeviceMesh) -> tuple[list[Any], list[Any]]:
    torch.manual_seed(dist.get_rank())
    model = CASES["odd"].model()
    model.register_buffer("mark", torch.rand(3))
    before = [*model.parameters(), model.mark]
    before = [t.detach().tolist() for t in before]
    fcdp_compile.shard(model, mesh)
    return before, [whole(t).tolist() for t in [*model.parameters(), model.mark]]


def test_rank_0_has_the_values() -> None:
    results = run(_different_values, nodes=2, ranks_per_node=2)
    expected = results[0][0]
    assert results[1][0] != expected
    assert all(after == expected for _, after in results)


class _Branches(nn.Module):
    """Two branches with equal shapes; the data choose one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.left(inputs) if inputs.sum() > 0 else self.right(inputs)


class _Both(_Branches):
    """Both branches run, and the loss uses one."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = self.left(inputs), self.right(inputs)
        return outputs[0] if inputs.sum() > 0 else outputs[1]


class _PartlyCompiled(_Branches):
    """One of the two branches is not compiled."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.sum() > 0:
            return self.left(inputs)
        return self._eagerly(inputs)

    @torch._dynamo.disable
    def _eagerly(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.right(inputs)


def _different_branches(mesh: DeviceMesh) -> dict[str, str]:
    inputs = torch.ones(2, 8) * (-1 if dist.get_rank() == 2 else 1)
    messages = {}
    for name, made in (("eager", _Branches), ("backward", _Both), ("mixed", _PartlyCompiled)):
        model = fcdp_compile.shard(made(), mesh)
        net: Any = torch.compile(model, backend="fcdp") if name == "mixed" else model
        messages[name] = message_of(PlanMismatchError, lambda: net(inputs).sum().backward())  # noqa: B023
        dist.barrier()
    return messages | _full_beside_a_forward(mesh)


def _full_beside_a_forward(mesh: DeviceMesh) -> dict[str, str]:
    model = fcdp_compile.shard(_Branches(), mesh)
    inputs = torch.ones(2, 8)

    def differs() -> None:
        if dist.get_rank() == 2:
            fcdp_compile.full(model.left.weight)
        else:
            model(inputs)

    messages = {"full": message_of(PlanMismatchError, differs)}
    model(inputs)
    with torch.no_grad():
        model.left.weight.mul_(2.0)  # a forward refreshes its copy, and `full` keeps none
    return messages | {"full, outdated": message_of(PlanMismatchError, differs)}


def test_branches_that_depend_on_the_data_stop_before_parameters_are_mixed_up() -> None:
    for messages in run(_different_branches, nodes=2, ranks_per_node=2):
        assert messages["eager"].startswith(
            "rank 0 gathers parameter 'left.weight' for a forward and rank 2 gathers parameter "
            "'right.weight' for a forward; let every"
        )
        assert messages["backward"].startswith("rank 0 reduces the gradient of parameter 'left.")
        assert messages["mixed"].startswith(
            "rank 0 runs a compiled graph and rank 2 gathers parameter 'right.weight'"
        )
        forward = "rank 0 gathers parameter 'left.weight' for a forward and rank 2 "
        assert messages["full"].startswith(f"{forward}gathers parameter 'left.weight'; let")
        outdated = f"{forward}reads a copy of parameter 'left.weight'; let"
        assert messages["full, outdated"].startswith(outdated)
