"""Models built on meta on several ranks: materialize gives every rank its rows of an unsharded build."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError
from tests.distributed.beside import Beside, whole
from tests.distributed.deferred import (
    SAME,
    built,
    expect,
    memory,
)
from tests.distributed.jobs import WORKS, Job, asked, message_of, rows, run_jobs
from tests.distributed.models import CASES, batch, llama

pytestmark = pytest.mark.distributed


def _same(mesh: DeviceMesh, name: str, **options: Any) -> None:
    torch.manual_seed(7)
    plain = SAME[name]()
    # Ranks have different states of random numbers, before and after.
    with torch.device("meta"):
        model = SAME[name]()
    model = fcdp_compile.shard(model, mesh, **options)
    torch.manual_seed(7 + 100 * dist.get_rank())
    before = torch.get_rng_state()
    fcdp_compile.materialize(model)
    expect(model, plain)
    if dist.get_rank():
        assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    model2 = built(SAME[name], mesh, 7, **options)
    states = [torch.empty_like(before) for _ in range(dist.get_world_size())]
    dist.all_gather(states, torch.get_rng_state())
    assert all(torch.equal(s, states[0]) for s in states), "all stand where rank 0 does"
    expect(model2, plain)


def _train(mesh: DeviceMesh) -> None:
    """A materialised model trains like a model built with values; before, no forward runs."""
    torch._dynamo.reset()
    case = CASES["llama"]
    with torch.device("meta"):
        model = case.model()
    model = fcdp_compile.shard(model, mesh)
    net = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    ids = batch(case, step=0, rank=dist.get_rank())
    for call in (net, model, lambda **kw: model.model(kw["input_ids"])):
        found = message_of(FcdpError, lambda call=call: call(input_ids=ids))
        assert "a forward needs the values of 'model.embed_tokens.weight'" in found, found
    optimizer = torch.optim.AdamW(model.parameters())
    assert "an optimizer step needs" in message_of(FcdpError, optimizer.step)
    torch.manual_seed(0)
    fcdp_compile.materialize(model)
    pair = Beside(mesh, case, options={"compute": "eager"})  # the same seed
    for step in range(2):
        mine, other = (case.loss(n, pair.data(step)) for n in (net, pair.net))
        assert mine.item() == other.item()
        (mine * 1.0).backward()
        other.backward()
        for a, b in zip(model.parameters(), pair.model.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            assert torch.equal(whole(a.grad), whole(b.grad))
        model.zero_grad()
        pair.model.zero_grad()


def _loaded(mesh: DeviceMesh) -> None:
    """DCP's tools give values; parameters that they leave out still lack values, on every rank alike."""
    torch.manual_seed(3)
    plain = llama()
    with torch.device("meta"):
        model = llama()
    model = fcdp_compile.shard(model, mesh)
    full = {k: v.clone() for k, v in plain.state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    state = state_of(model)
    assert not state.unset.keys
    assert state.unset.buffers, "rotary frequencies are in no state dict"
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert "inv_freq" in message_of(FcdpError, lambda: model(input_ids=ids))
    fcdp_compile.materialize(model)
    expect(model, plain)


def _loaded_on_one(mesh: DeviceMesh) -> None:
    """Values on one rank alone: every rank raises, and none waits."""
    with torch.device("meta"):
        model = nn.Linear(6, 6)
    model = fcdp_compile.shard(model, mesh)
    if dist.get_rank() == 1:
        model.load_state_dict({k: v.detach() for k, v in model.state_dict().items()})
    found = message_of(FcdpError, lambda: model(torch.ones(2, 6)))
    assert "load the same on every rank" in found or "needs the values of 'weight'" in found
    found = message_of(FcdpError, lambda: fcdp_compile.materialize(model))
    assert "load the same on every rank before fcdp_compile.materialize" in found


class _Pythons(nn.Linear):
    """Draws from another generator than torch's."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, random.random())
        nn.init.zeros_(self.bias)


class _FailsOnRank1(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if dist.is_initialized() and dist.get_rank() == 1 and not self.weight.is_meta:
            raise ArithmeticError("no luck")


def _differing(mesh: DeviceMesh) -> None:
    random.seed(dist.get_rank())
    found = message_of(FcdpError, lambda: built(partial(_Pythons, 5, 5), mesh))
    assert "ranks have initialised 'weight' differently" in found, found


def _failing_rank(mesh: DeviceMesh) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 3), _FailsOnRank1(3, 3), nn.Linear(3, 3))

    found = message_of(FcdpError, lambda: built(make, mesh))
    assert "no luck" in found, found


def _different_on_meta(mesh: DeviceMesh) -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Linear(3, 3)
    found = message_of(ValueError, lambda: fcdp_compile.shard(model, mesh))
    assert "on meta" in found, found


_JOBS: dict[str, Job] = {
    **{name: partial(_same, name=name) for name in ("odd", "tied", "dora", "a trained head")},
    "llama, param_dtype": partial(_same, name="llama", param_dtype=torch.bfloat16),
    **{f"llama, {s}": partial(_same, name="llama", strategy=s) for s in ("ddp", "zero2", "mics")},
    "train": _train,
    "memory": memory,
    "loaded": _loaded,
    "loaded on one rank": _loaded_on_one,
    "differing": _differing,
    "failing rank": _failing_rank,
    "different on meta": _different_on_meta,
}

_SLOW = ("train", "dora", "a trained head", "llama, ddp", "llama, zero2")


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    return run_jobs(asked(request, _JOBS), nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("job", rows(_JOBS, slow=_SLOW, cpu=["memory"]))
def test_on_ranks(verdicts: list[dict[str, str]], job: str) -> None:
    assert [v[job] for v in verdicts] == [WORKS] * 4


def test_on_three_ranks() -> None:
    jobs: dict[str, Job] = {n: partial(_same, name=n) for n in ("odd", "tied", "lora")}
    for verdict in run_jobs(jobs, nodes=1, ranks_per_node=3):
        assert verdict == dict.fromkeys(jobs, WORKS)
