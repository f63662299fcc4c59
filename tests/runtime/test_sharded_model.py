"""Records of a sharded model and what it does for optimizers, on an echo group of 2 x 2 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.runtime.collectives.collectives import Collectives, Telling
from fcdp_compile.torch_compat.distributed import calls_dispatch_of_subclasses
from tests.streams.programs import four_ranks


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with four_ranks():
        yield


def _sharded() -> nn.Linear:
    model: nn.Linear = fcdp_compile.shard(nn.Linear(8, 8), fcdp_compile.make_mesh(nodes=2))
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.rand(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_home_shard_is_known_by_its_memory() -> None:
    model = _sharded()
    record = state_of(model).records.by_name["weight"]
    home = record.local()
    assert record.is_home(home)
    assert record.is_home(home.view(home.shape))
    assert record.is_home(home[:0])
    assert not record.is_home(home.clone())
    assert not record.is_home(home[:1])


@pytest.mark.skipif(
    not calls_dispatch_of_subclasses(),
    reason="operations on home shards are DTensor's own on torch 2.11",
)
def test_an_optimizer_that_communicates_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = _sharded()
    optimizer = torch.optim.Muon([model.weight])
    for _ in range(3):
        _step(model, optimizer)
    assert [r.getMessage()[:30] for r in caplog.records] == ["Muon communicates in its step:"]


def test_whole_moments_are_cut_and_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = nn.Linear(8, 8), _sharded()
    of_plain, of_model = (torch.optim.Adam(m.parameters()) for m in (plain, model))
    _step(plain, of_plain)
    _step(model, of_model)
    said: list[object] = []
    monkeypatch.setattr(dist, "all_gather_object", lambda _, value, **__: said.append(value))
    of_model.load_state_dict(of_plain.state_dict())
    whole, cut = of_plain.state[plain.weight]["exp_avg"], of_model.state[model.weight]["exp_avg"]
    assert isinstance(cut, DTensor)
    assert isinstance(part := cut.to_local(), Tensor)
    assert torch.equal(part, model.weight.part_of(whole))  # type: ignore[attr-defined]
    assert said == []


def test_an_optimizer_is_the_business_of_the_model_that_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    companion, model, plain = _sharded(), _sharded(), nn.Linear(8, 8)
    of_plain, of_model = (torch.optim.Adam(m.parameters()) for m in (plain, model))
    _step(plain, of_plain)
    asked: list[Collectives] = []
    tell = Collectives.tell

    def told(self: Collectives, *args: Any) -> Telling:
        asked.append(self)
        return tell(self, *args)

    monkeypatch.setattr(Collectives, "tell", told)
    _step(model, of_model)
    of_model.load_state_dict(of_plain.state_dict())
    _step(model, of_model)
    assert companion.weight.grad is None
    assert set(asked) == {state_of(model).collectives}
