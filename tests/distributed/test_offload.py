"""States of sharded parameters in host memory: bits, bytes, checkpoints and refusals on all ranks."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adafactor, AdamW, Optimizer

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError, PlanMismatchError
from fcdp_compile.runtime.cache import host_budget
from tests.distributed.ranks import run
from tests.formulas import state_bytes

pytestmark = pytest.mark.distributed

TINY = 1e-4
"""MiB of a bucket: one or two of the parameters below."""

Make = Callable[[nn.Module], Optimizer]


def _model(seed: int = 0) -> nn.Module:
    """Matrices of uneven rows, so that ranks have rows of different numbers."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 5)]
    return nn.Sequential(*hidden, nn.Linear(5, 17, bias=False))


def _sharded(mesh: DeviceMesh, strategy: str, seed: int = 0) -> tuple[nn.Module, Any]:
    model = fcdp_compile.shard(_model(seed), mesh, strategy=strategy)
    return model, torch.compile(model, backend="fcdp", options={"compute": "eager"})


def _train(model: nn.Module, optimizer: Optimizer, net: Any, steps: Iterable[int]) -> None:
    for step in steps:
        torch.manual_seed(10 * step + dist.get_rank())
        net(torch.randn(3, 7)).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _of(parameters: Iterable[Tensor], dims: int) -> list[Tensor]:
    return [p for p in parameters if p.dim() == dims]


def _muon_and_adamw(model: nn.Module, change: Callable[[Optimizer], Optimizer]) -> Optimizer:
    muon = fcdp_compile.Muon(_of(model.parameters(), 2), lr=0.02)
    return fcdp_compile.combine(change(muon), change(AdamW(_of(model.parameters(), 1), lr=0.01)))


def _on_host(optimizer: Optimizer) -> Optimizer:
    return fcdp_compile.offload(optimizer, bucket_mb=TINY)


def _by_host(optimizer: Optimizer) -> Optimizer:
    return fcdp_compile.offload(optimizer, "cpu", bucket_mb=TINY)


def _as_it_is(optimizer: Optimizer) -> Optimizer:
    return optimizer


MAKERS: dict[str, tuple[str, Callable[..., Optimizer]]] = {
    "AdamW": ("fcdp", lambda m, change: change(AdamW(m.parameters(), lr=0.01))),
    "fused": ("fcdp", lambda m, change: change(AdamW(m.parameters(), lr=0.01, fused=True))),
    "SGD": ("zero3", lambda m, change: change(SGD(m.parameters(), lr=0.1, momentum=0.9))),
    "Adafactor": ("mics", lambda m, change: change(Adafactor(m.parameters()))),
    "Muon": ("fcdp+matrix", _muon_and_adamw),
}
"""Strategy, and a function that makes the optimizer of a model, in which `change` offloads or does not."""


def _part(value: Any) -> Any:
    """This rank's values on the host, where states of an offloaded optimizer are."""
    return (value.to_local() if isinstance(value, DTensor) else value).cpu()


def _check_same(about: str, one: Any, other: Any, same: Any = torch.equal) -> None:
    """Compare the parameters and states of two models and optimizers: [model, optimizer] each."""
    for p, q in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert same(_part(p), _part(q)), about
    mine, others = one[1].state_dict()["state"], other[1].state_dict()["state"]
    assert mine.keys() == others.keys(), about
    for index, states in mine.items():
        for key, value in states.items():
            found = others[index][key]
            assert isinstance(found, DTensor) == isinstance(value, DTensor), (about, index, key)
            if isinstance(value, Tensor):
                assert same(_part(value), _part(found)), (about, index, key)


def _check_parity(mesh: DeviceMesh) -> None:
    for name, (strategy, make) in MAKERS.items():
        runs = []
        for change in (_as_it_is, _on_host):
            model, net = _sharded(mesh, strategy)
            optimizer = make(model, change)
            _train(model, optimizer, net, range(4))
            runs.append((model, optimizer))
        _check_same(name, *runs)
        counts = [state_of(model).counters for model, _ in runs]
        assert counts[0].steps == counts[1].steps, name
        if name != "Muon":
            by_host, net = _sharded(mesh, strategy)
            optimizer = make(by_host, _by_host)
            _train(by_host, optimizer, net, range(4))
            same = torch.equal if name == "fused" else partial(torch.allclose, atol=1e-6)
            _check_same(name, runs[0], (by_host, optimizer), same)
    model, net = _sharded(mesh, "fcdp")
    optimizer = _on_host(AdamW(model.parameters()))
    _train(model, optimizer, net, range(3))
    buckets: Any = optimizer.buckets  # type: ignore[attr-defined]
    shards = [[_part(p).nbytes for p in bucket.parameters] for bucket in buckets]
    expected, state = state_bytes(shards, 2), state_of(model)
    assert state.counters.last_step["load_states"] == expected.to_device > 0
    assert state.counters.last_step["store_states"] == expected.to_host
    assert sum(b.size_bytes for b in buckets) == expected.to_host
    # Every rank books what the largest rank needs.
    booked: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(booked, (state.host_memory.unplanned_bytes, expected.host))
    assert {own for own, _ in booked} == {max(host for _, host in booked)}


@pytest.mark.slow
def test_all_bits_and_bytes() -> None:
    run(_check_parity, nodes=2, ranks_per_node=2)


def _check_refusals(mesh: DeviceMesh) -> None:
    model, net = _sharded(mesh, "fcdp")
    detect = host_budget.detect

    def less(**ranks: Any) -> Any:  # on one rank
        found = detect(**ranks)
        return replace(found, bytes=5000) if dist.get_rank() == 1 else found

    host_budget.detect = less  # type: ignore[assignment]
    poor, _ = _sharded(mesh, "fcdp")
    host_budget.detect = detect
    with pytest.raises(FcdpError, match=r"states of AdamW take \d+ bytes .*, but only 5000 bytes"):
        _on_host(AdamW(poor.parameters()))
    assert state_of(poor).pool.slab_bytes == 0
    parameters = list(model.parameters())
    with pytest.raises(PlanMismatchError, match="offloads the states of AdamW for 6 parameters"):
        _on_host(AdamW(parameters[: 6 + (dist.get_rank() == 2)]))
    for options in ({"folder": "."}, {"bucket_mb": 1.0}):
        mine = options if dist.get_rank() == 2 else {}
        with pytest.raises(PlanMismatchError, match=r"offloads the states of AdamW for \d+ param"):
            fcdp_compile.offload(AdamW(parameters), **mine)  # type: ignore[arg-type]
    reserve = os.posix_fallocate

    def full(*about: Any) -> None:  # on one rank
        if dist.get_rank() == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(*about)

    optimizer = AdamW(parameters)
    with tempfile.TemporaryDirectory() as folder:
        os.posix_fallocate = full
        with pytest.raises(
            FcdpError, match=r"rank 3: cannot reserve \d+ bytes for the states of Ad"
        ):
            fcdp_compile.offload(optimizer, folder=folder)
        os.posix_fallocate = reserve
        # Nothing is lost.
        _train(model, fcdp_compile.offload(optimizer, folder=folder), net, range(2))
        assert not os.listdir(folder)
    again = _on_host(AdamW(parameters))
    _train(model, again, net, range(2))
    # A state that says that it is elsewhere, as one does that was loaded on the host, while a GPU steps.
    bucket: Any = again.buckets[0]  # type: ignore[attr-defined]
    (key, value), *_ = ((k, v) for k, v in again.state[parameters[0]].items() if v.dim())
    there = DTensor.__new__(DTensor, value.to_local().to("meta"), value._spec, requires_grad=False)
    there._local_tensor = value.to_local().clone()
    assert there.device.type == "meta"
    again.state[parameters[0]][key] = there
    bucket.absorb(again.state)
    moved = again.state[parameters[0]][key]
    assert moved.device == parameters[0].device
    assert torch.equal(moved.to_local(), there.to_local())
    assert moved.to_local().data_ptr() == bucket.views[0][key].data_ptr()


def test_refusals_are_alike_on_all_ranks() -> None:
    run(_check_refusals, nodes=2, ranks_per_node=2)


def _check_checkpoints(mesh: DeviceMesh, folder: str) -> None:
    for name in ("AdamW", "Muon"):
        strategy, make = MAKERS[name]
        for change in (_on_host, _as_it_is):
            model, net = _sharded(mesh, strategy)
            optimizer = make(model, change)
            _train(model, optimizer, net, range(2))
            fcdp_compile.save(f"{folder}/{name}{change.__name__}", model, optimizer=optimizer)
        runs = []
        for saved, change, nodes, other in (
            (_on_host, _as_it_is, 2, strategy),
            (_as_it_is, _on_host, 2, strategy),
            (_on_host, _on_host, 1, "zero3"),
            (_as_it_is, _by_host if name == "AdamW" else _on_host, 1, "zero3"),
        ):
            loaded, again = _sharded(fcdp_compile.make_mesh(nodes=nodes), other, seed=1)
            states = make(loaded, change)
            fcdp_compile.load(f"{folder}/{name}{saved.__name__}", loaded, optimizer=states)
            if nodes == 2:
                _check_same(name, (model, optimizer), (loaded, states))
            _train(loaded, states, again, [5])
            runs.append((loaded, states))
        _check_same(name, *runs[:2])
        _check_same(name, *runs[2:], partial(torch.allclose, atol=1e-6))


def _check_torchs_state_dicts(mesh: DeviceMesh) -> None:
    runs = []
    for change in (_on_host, _as_it_is):
        model, net = _sharded(mesh, "fcdp")
        optimizer = MAKERS["AdamW"][1](model, change)
        _train(model, optimizer, net, range(2))
        runs.append((model, optimizer, net))
    for (model, optimizer, net), change in zip(runs, (_as_it_is, _on_host), strict=True):
        taken = get_optimizer_state_dict(model, optimizer)
        other, other_net = _sharded(mesh, "fcdp", seed=1)
        other.load_state_dict(model.state_dict())
        states = MAKERS["AdamW"][1](other, change)
        set_optimizer_state_dict(other, states, taken)
        _check_same("DCP", (model, optimizer), (other, states))
        again = MAKERS["AdamW"][1](other, _on_host)
        again.load_state_dict(_whole(optimizer.state_dict()))
        _train(other, again, other_net, [7])
        _train(model, optimizer, net, [7])
        _check_same("whole tensors", (model, optimizer), (other, again))


def _whole(given: dict[str, Any]) -> dict[str, Any]:
    states = {
        i: {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in of_one.items()}
        for i, of_one in given["state"].items()
    }
    return {**given, "state": states}


def _check_loading(mesh: DeviceMesh) -> None:
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    _check_checkpoints(mesh, folders[0])
    _check_torchs_state_dicts(mesh)


@pytest.mark.rare
def test_checkpoints_with_and_without() -> None:
    run(_check_loading, nodes=2, ranks_per_node=2)
