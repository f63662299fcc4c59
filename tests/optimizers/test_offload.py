"""States that wait in host memory: numbers, bytes and mistakes of one process."""

from __future__ import annotations

import copy
import errno
import gc
import operator
import os
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import fcdp_compile
from fcdp_compile.cluster.free_memory import HostBudget, Limit
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import ArgumentError, CheckpointError, FcdpError
from fcdp_compile.plan import Lane
from fcdp_compile.runtime.cache import host_budget
from fcdp_compile.runtime.lanes.lanes import Lanes
from tests.device.checked import CheckedDevice
from tests.formulas import bytes_of_host_steps, state_bytes
from tests.offloaded import (
    MAKERS,
    TINY,
    Net,
    assert_same,
    assert_same_states,
    groups,
    sharded,
    train,
)
from tests.runtime.simulated_device import SimulatedDevice


@pytest.mark.parametrize("uses_files", [False, True], ids=["memory", "files"])
@pytest.mark.parametrize("step_on", ["gpu", "cpu"])
@pytest.mark.parametrize("name", MAKERS)
def test_numbers_are_those_of_the_optimizer(
    name: str, step_on: str, tmp_path: Path, *, uses_files: bool
) -> None:
    plain, model = sharded(), sharded()
    as_it_is, inner = MAKERS[name](groups(plain)), MAKERS[name](groups(model))
    folder = tmp_path if uses_files else None
    offloaded = fcdp_compile.offload(inner, step_on, folder, bucket_mb=TINY)
    # The host chooses fused kernels, which round in another way.
    exact = step_on == "gpu" or "fused" in name
    schedules = [StepLR(optimizer, 2, 0.5) for optimizer in (as_it_is, offloaded)]
    train(plain, as_it_is, range(7), schedules[0])
    train(model, offloaded, range(7), schedules[1])
    assert_same(plain, model, exact=exact)
    assert_same_states(as_it_is, offloaded, exact=exact)
    assert all(map(operator.is_, offloaded.param_groups, inner.param_groups))
    assert not [*tmp_path.iterdir()], "files have no names"


@pytest.mark.parametrize("step_on", ["gpu", "cpu"])
@pytest.mark.parametrize("name", ["AdamW", "fused Adam", "SGD"])
def test_state_dicts_load_with_and_without(name: str, step_on: str) -> None:
    models = [sharded() for _ in range(3)]
    offloads = (False, True, True)
    made = [MAKERS[name](groups(model)) for model in models]
    optimizers = [
        fcdp_compile.offload(o, step_on, bucket_mb=TINY) if offloaded else o
        for o, offloaded in zip(made, offloads, strict=True)
    ]
    train(models[0], optimizers[0], range(3))
    for of, to in ((0, 1), (1, 2), (2, 0)):
        given = copy.deepcopy(optimizers[of].state_dict())  # as torch's, it keeps what it is given
        models[to].load_state_dict(models[of].state_dict())
        optimizers[to].load_state_dict(given)
        for _ in range(2):
            train(models[of], optimizers[of], [9])
            train(models[to], optimizers[to], [9])
        exact = step_on == "gpu" or "fused" in name
        assert_same(models[of], models[to], exact=exact)
        assert_same_states(optimizers[of], optimizers[to], exact=exact)


def test_an_optimizer_that_has_stepped_and_groups_that_come_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stores are slow, and the last bucket has nothing to store."""
    start = Lanes.start

    def started(self: Lanes, lane: Lane, run: Any, **more: Any) -> Any:
        def slow() -> Any:
            time.sleep(0.02)
            return run()

        return start(self, lane, slow if lane is Lane.D2H else run, **more)

    monkeypatch.setattr(Lanes, "start", started)
    plain, model = sharded(), sharded()
    pairs = []
    for net in (plain, model):
        optimizer: Optimizer = AdamW(net.first.parameters(), lr=0.01)
        train(net, optimizer, [1])
        if net is model:
            optimizer = fcdp_compile.offload(optimizer)
        optimizer.add_param_group({"params": list(net.second.parameters()), "lr": 0.1})
        train(net, optimizer, [2])
        if net is model:
            optimizer.inner.add_param_group({"params": [net.scale]})  # type: ignore[attr-defined]
        else:
            optimizer.add_param_group({"params": [net.scale]})
        train(net, optimizer, [4, 5])
        pairs.append(optimizer)
    assert_same(plain, model)
    assert_same_states(*pairs)


def _sizes(optimizer: Any) -> list[list[int]]:
    return [[p.nbytes for p in b.parameters if p.dim()] for b in optimizer.buckets]


@pytest.mark.parametrize("bucket_mb", [TINY, 4e-4, 1.0])
@pytest.mark.parametrize(("name", "states"), [("AdamW", 2), ("SGD", 1), ("SGD without states", 0)])
def test_counters_and_slabs_are_the_formula(name: str, states: int, bucket_mb: float) -> None:
    model = sharded()
    before = fcdp_compile.memory(model).host_bytes
    optimizer: Any = fcdp_compile.offload(MAKERS[name](groups(model)), bucket_mb=bucket_mb)
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    start = Lanes.start

    def started(self: Lanes, lane: Lane, run: Any, *, out: Tensor, **more: Any) -> Any:
        nonlocal most
        if lane is Lane.H2D:
            alive.append(weakref.ref(out))
            found = [t for ref in alive if (t := ref()) is not None]
            most = max(most, sum(t.nbytes for t in found))
        return start(self, lane, run, out=out, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lanes, "start", started)
        train(model, optimizer, [1, 2, 4])
    expected = state_bytes(_sizes(optimizer), states)
    counted = state_of(model).counters.last_step
    assert counted.get("load_states", 0) == expected.to_device
    assert counted.get("store_states", 0) == expected.to_host
    assert fcdp_compile.memory(model).host_bytes - before == expected.host
    assert state_of(model).host_memory.unplanned_bytes == expected.host
    assert most == expected.in_flight
    assert not [ref for ref in alive if ref() is not None], "nothing stays on the device"
    rows = fcdp_compile.traffic(model).last_step
    assert rows.bytes("h2d", "load_states") == expected.to_device


@pytest.mark.parametrize("bucket_mb", [TINY, 1.0])
def test_bytes_of_steps_on_the_host(bucket_mb: float) -> None:
    """Only what others have written to is copied to the host again."""
    model, plain = sharded(), sharded()
    make = partial(AdamW, lr=0.01, fused=True)
    matrices, others = ([p for p in m.parameters() if p.dim() == 2] for m in (model, plain))
    optimizer: Any = fcdp_compile.offload(make(matrices), "cpu", bucket_mb=bucket_mb)
    reference = make(others)
    expected = bytes_of_host_steps(_sizes(optimizer), 2)
    counters = state_of(model).counters

    def moved() -> tuple[int, int]:
        last = counters.last_step
        return last["store_states"] - expected.to_host, last["load_states"] - expected.to_device

    assert state_of(model).pool.slab_bytes == expected.host
    assert state_of(model).host_memory.unplanned_bytes == expected.host
    found = []
    for step in (1, 2, 4, 5, 7):
        if step == 4:
            for net in (model, plain):
                net.second.weight.data.mul_(0.5)
        train(model, optimizer, [step])
        train(plain, reference, [step])
        found.append(moved())
    whole = sum(map(sum, _sizes(optimizer)))
    of_one = whole if bucket_mb == 1.0 else plain.second.weight.nbytes
    assert found == [(whole, 0), (0, 0), (of_one, 0), (0, 0), (0, 0)]
    for p, q in zip(matrices, others, strict=True):
        assert torch.equal(p, q)


def test_the_memory_is_free_when_the_optimizer_is_gone() -> None:
    model = sharded()
    state = state_of(model)
    for _ in range(3):
        optimizer = fcdp_compile.offload(AdamW(model.parameters()))
        train(model, optimizer, [1])
        booked = state.host_memory.unplanned_bytes
        assert booked == state.pool.slab_bytes > 0
        del optimizer
        gc.collect()
        assert state.pool.slab_bytes == 0
    assert state.host_memory.unplanned_bytes == booked, "known to be free at the next offload"


def test_host_memory_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    found = HostBudget(bytes=4096, limit=Limit.CGROUP)
    monkeypatch.setattr(host_budget, "detect", lambda **ranks: found)
    model = sharded()
    with pytest.raises(
        FcdpError,
        match=r"the states of AdamW take \d+ bytes of host memory a rank, but only 4096 bytes are left "
        r"because of the memory limit of the control group; raise the memory limit",
    ):
        fcdp_compile.offload(AdamW(model.parameters()), bucket_mb=TINY)
    assert state_of(model).pool.slab_bytes == 0
    optimizer = fcdp_compile.offload(AdamW(model.parameters()))
    train(model, optimizer, [1])


class _Counting(SGD):
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1
        return super().step(closure)


class _Failing(SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails and self.param_groups[0]["params"][0].shape == (9,):
            raise KeyError("by intention")
        return super().step(closure)


_ONE, _OTHER = Net(), Net()


@pytest.fixture(scope="module", autouse=True)
def two_models() -> None:
    for model in (_ONE, _OTHER):
        fcdp_compile.shard(model, fcdp_compile.make_mesh())


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: nn.Linear(1, 1), "takes a torch optimizer, not Linear"),
        (lambda: AdamW(Net().parameters()), "no trainable parameter of a sharded model"),
        (
            lambda: AdamW([*_ONE.parameters(), *_OTHER.parameters()]),
            "steps parameters of 2 sharded models",
        ),
        (lambda: LBFGS(_ONE.parameters()), "without a closure raises TypeError"),
        (lambda: _Counting(_ONE.parameters()), "changes more than its parameters"),
        (lambda: fcdp_compile.combine(SGD(_ONE.parameters())), "offload each optimizer, once"),
        (lambda: fcdp_compile.offload(SGD(_ONE.parameters())), "not Offloaded; offload each"),
    ],
)
def test_optimizers_that_cannot_be_offloaded(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ArgumentError, match=problem):
        fcdp_compile.offload(make())


def test_places_that_cannot_step() -> None:
    with pytest.raises(ArgumentError, match="Muon multiplies whole matrices, for which a CPU is"):
        fcdp_compile.offload(fcdp_compile.Muon([_ONE.first.weight]), "cpu")
    with pytest.raises(ArgumentError, match=r"step_on must be 'gpu' or 'cpu', not 'tpu'"):
        fcdp_compile.offload(AdamW(_ONE.parameters()), "tpu")


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf"), True, "64", None])
def test_sizes_of_buckets(size: Any) -> None:
    with pytest.raises(ArgumentError, match="bucket_mb must be a number of MiB above 0"):
        fcdp_compile.offload(AdamW(_ONE.parameters()), bucket_mb=size)


def test_folders(tmp_path: Path) -> None:
    problems: dict[Any, tuple[type[Exception], str]] = {
        0: (ArgumentError, "folder must be a path, not int"),
        "": (ArgumentError, "the folder is an empty string"),
        str(tmp_path / "no"): (
            FcdpError,
            "No such file or directory.; choose a folder that exists",
        ),
        "/tmp\0x": (FcdpError, "null byte.; choose a folder that exists"),
    }
    for folder, (error, match) in problems.items():
        with pytest.raises(error, match=match):
            fcdp_compile.offload(AdamW(_ONE.parameters()), folder=folder)


def test_an_optimizer_is_offloaded_once_and_for_one_model() -> None:
    model, other = sharded(), sharded()
    inner = AdamW(model.parameters())
    offloaded = fcdp_compile.offload(inner)
    with pytest.raises(
        ArgumentError, match="is offloaded already; use what the first call returned"
    ):
        fcdp_compile.offload(inner)
    with pytest.raises(ArgumentError, match="steps parameters of 2 sharded models"):
        offloaded.add_param_group({"params": list(other.parameters())})
    train(model, offloaded, [1, 2])
    del offloaded
    gc.collect()
    train(model, fcdp_compile.offload(inner), [4])


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = sharded(), sharded()
    optimizer, reference = AdamW(model.parameters()), AdamW(plain.parameters())
    train(model, optimizer, [1])

    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for folder, problem in (
        (tmp_path, "No space left on device"),
        (tmp_path / "none", "No such file or directory"),
    ):
        with monkeypatch.context() as patch:
            if folder is tmp_path:
                patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(
                FcdpError,
                match=rf"cannot reserve \d+ bytes for the states of AdamW in .*\({problem}\)",
            ):
                fcdp_compile.offload(optimizer, folder=folder)
    train(model, fcdp_compile.offload(optimizer, folder=tmp_path), [2])
    train(plain, reference, [1, 2])
    assert_same(plain, model)
    assert state_of(model).pool.slab_bytes == state_of(model).host_memory.unplanned_bytes == 0


def test_a_failed_step_loses_nothing() -> None:
    model, plain = sharded(), sharded()
    inner = _Failing(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = fcdp_compile.offload(inner, bucket_mb=TINY)
    train(model, optimizer, [1])
    owned = [list(group["params"]) for group in optimizer.param_groups]
    inner.fails = True
    with pytest.raises(KeyError, match="by intention"):
        train(model, optimizer, [2])
    inner.fails = False
    assert [group["params"] for group in optimizer.param_groups] == owned
    optimizer.step()  # the first bucket, which has only `first.weight`, steps twice
    reference = SGD(plain.parameters(), lr=0.01, momentum=0.9)
    train(plain, reference, [1])
    torch.manual_seed(2)
    plain(torch.randn(4, 5)).square().mean().backward()
    grads = {p: p.grad for p in plain.parameters()}
    for p in plain.parameters():
        p.grad = grads[p] if p is plain.scale or p is plain.first.weight else None
    reference.step()
    for p, grad in grads.items():
        p.grad = grad if p is not plain.scale else None
    reference.step()
    for name, p in model.named_parameters():
        if name != "scale":
            assert torch.equal(p, dict(plain.named_parameters())[name]), name


def test_quantised_states_are_not_saved(tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.optim.subclass_8bit")
    model = fcdp_compile.shard(nn.Linear(16, 256), fcdp_compile.make_mesh())
    optimizer = AdamW(model.parameters())
    optimizer.state[model.weight] = {"exp_avg": torchao.OptimState8bit.zeros((256, 16))}
    with pytest.raises(
        CheckpointError, match=r"\['weight'\]\['exp_avg'\] is quantised \(OptimState8bit\)"
    ):
        fcdp_compile.save(str(tmp_path), model, optimizer=optimizer)


def test_copies_are_refused() -> None:
    with pytest.raises(FcdpError, match=r"offloaded AdamW cannot be copied or pickled"):
        copy.deepcopy(fcdp_compile.offload(AdamW(_ONE.parameters())))


def test_combined_scaled_and_with_closure() -> None:
    plain, model = sharded(), sharded()
    made: list[Optimizer] = []
    for net in (plain, model):
        two: list[Optimizer] = [
            SGD([p for p in net.parameters() if p.dim() == 2], lr=0.1, momentum=0.9),
            AdamW([p for p in net.parameters() if p.dim() != 2], lr=0.01, fused=True),
        ]
        if net is model:
            two = [fcdp_compile.offload(optimizer, bucket_mb=TINY) for optimizer in two]
        optimizer = fcdp_compile.combine(*two)
        made.append(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            torch.manual_seed(step)
            loss = net(torch.randn(4, 5)).square().mean()
            scaler.scale(loss * (torch.inf if step == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        def closure(net: nn.Module = net, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = net(torch.ones(2, 5)).square().mean()
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
    assert_same(plain, model)
    assert_same_states(*made)
    counters = state_of(model).counters
    assert counters.steps == state_of(plain).counters.steps, "two optimizers of one step"
    shards = [p for p in model.parameters() if p.dim()]
    kinds = [(1 + (p.dim() == 1), p.nbytes) for p in shards]
    assert counters.last_step["load_states"] == sum(
        state_bytes([[size]], states).to_device for states, size in kinds
    )


@pytest.mark.parametrize("step_on", ["gpu", "cpu"])
def test_streams_access_the_states_in_order(step_on: str) -> None:
    model, plain = sharded(), sharded()
    state = state_of(model)
    state.device = CheckedDevice(SimulatedDevice(0))
    state.lanes = Lanes(state.device, is_blocking=False)
    optimizer = fcdp_compile.offload(AdamW(model.parameters(), fused=True), step_on, bucket_mb=TINY)
    reference = AdamW(plain.parameters(), fused=True)
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(4, 5)
        for net, stepping in ((plain, reference), (model, optimizer)):
            net(batch).square().mean().backward()
            with state.device.watching("the optimizer's step"):
                stepping.step()
            stepping.zero_grad()
    assert_same(plain, model)
