"""Ranks whose devices Gloo connects, as it does several ranks on one card: through the host's memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fcdp_compile
from tests.distributed.beside import Beside, assert_close, whole
from tests.distributed.models import CASES
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCDP_TEST_GLOO", "1")


def _train(mesh: DeviceMesh, case: str) -> None:
    """A step with clipped gradients, and the ways to read sharded values, which torch gives to Gloo."""
    pair = Beside(mesh, CASES[case], caches_on_host=True)
    pair.case.loss(pair.net, pair.data(0)).backward()
    pair.plain_backward(0)
    pair.compare_gradients()
    for act in (_sum, _clip, _clip_largest):
        assert_close(whole(act(pair.model)), act(pair.plain), act.__name__)
    pair.optimize()
    pair.compare_parameters()
    weight = next(p for p in pair.model.parameters() if p.requires_grad and p.numel())
    with torch.no_grad():
        weight.detach().redistribute(placements=weight.placements).mul_(2)  # type: ignore[attr-defined]
        weight.mul_(0.5)
    pair.compare_parameters()
    state = get_model_state_dict(pair.model, options=StateDictOptions(full_state_dict=True))
    for name, value in pair.plain.state_dict().items():
        assert_close(state[name], value, f"{name} in the state dict")


def _sum(model: nn.Module) -> Tensor:
    return torch.stack([whole(p.detach().square().sum()) for p in model.parameters()]).sum()


def _clip(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def _clip_largest(model: nn.Module) -> Tensor:
    some = [p for p in model.parameters() if p.numel()]  # an empty tensor has no largest element
    return nn.utils.clip_grad_norm_(some, 0.01, norm_type=math.inf)


def _read_cut_in_the_node(_: DeviceMesh) -> None:
    mesh = fcdp_compile.make_mesh(nodes=1, tp=2)
    assert mesh is not None
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    expected = model[0].weight.detach().clone()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
    fcdp_compile.shard(model, mesh)
    for whole_of in (fcdp_compile.full, whole):
        assert_close(whole_of(model[0].weight).detach(), expected, whole_of.__name__)


@pytest.mark.slow
def test_parameters_cut_by_tensor_parallelism_are_read() -> None:
    run(_read_cut_in_the_node, nodes=1, ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["odd", pytest.param("odd-lora", marks=pytest.mark.slow)])
def test_sharded_values_are_read_and_reduced_as_on_one_rank(case: str) -> None:
    run(_train, case, nodes=2, ranks_per_node=2)
