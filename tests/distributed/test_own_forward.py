"""A model whose instance has a replaced forward, as TRL and Liger do it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from tests.distributed.beside import assert_close, whole
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


def _own_forward(model: nn.Linear) -> nn.Linear:
    def forward(inputs: Tensor) -> Tensor:
        weight: Tensor = model.weight
        # A user of FSDP2 writes this; the gradient would not be averaged.
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        return inputs @ weight.t()

    model.forward = forward  # type: ignore[method-assign]
    return model


def _train(mesh: DeviceMesh, is_compiled: bool) -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    plain = nn.Linear(5, 3, bias=False)
    model = fcdp_compile.shard(_own_forward(copy.deepcopy(plain)), mesh)
    net = torch.compile(model, backend="fcdp") if is_compiled else model
    batches = [torch.arange(10.0).reshape(2, 5) * (r + 1) for r in range(2)]
    net(batches[rank]).square().mean().backward()
    for batch in batches:
        (plain(batch).square().mean() / 2).backward()
    assert model.weight.grad is not None
    assert plain.weight.grad is not None
    assert_close(whole(model.weight.grad), plain.weight.grad, "the gradient")


def _both(mesh: DeviceMesh) -> None:
    for is_compiled in (False, True):
        _train(mesh, is_compiled)


def test_its_gradients_are_averaged() -> None:
    run(_both, nodes=2, ranks_per_node=1)
