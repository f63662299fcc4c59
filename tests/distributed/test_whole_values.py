"""Sharded tensors as whole tensors: random numbers, masks, slices, `out=`, and hooks from before `shard`.

Each check does the same to a sharded model and to one that is whole, and compares whole values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import fcdp_compile
from fcdp_compile.devices import current_device
from fcdp_compile.errors import FcdpError, MixedTensorsError
from tests.device.choice import seeded
from tests.distributed.ranks import run
from tests.marks import quick

Act = Callable[[Any, torch.Generator], Any]

FILLS: dict[str, tuple[Any, ...]] = {
    "normal_": (), "uniform_": (), "bernoulli_": (0.3,), "random_": (9,), "exponential_": (),
    "geometric_": (0.4,), "cauchy_": (), "log_normal_": (),
}  # fmt: skip


def _initialise(name: str) -> Act:
    def act(p: Any, generator: torch.Generator) -> None:
        if p.dim() > 1 or "a" not in name:  # xavier and kaiming need matrices
            getattr(nn.init, name)(p, generator=generator)

    return act


DRAWS: dict[str, Act] = {
    **{n: _initialise(n) for n in ("normal_", "trunc_normal_", "xavier_uniform_", "kaiming_normal_")},
    **{f"data.{n}": lambda p, g, n=n, a=a: getattr(p.data, n)(*a) for n, a in FILLS.items()},
    "with a generator": lambda p, g: p.data.normal_(generator=g),
    "randn_like": lambda p, g: torch.randn_like(p),
    "rand_like": lambda p, g: torch.rand_like(p.detach(), dtype=torch.float64),
    "randint_like": lambda p, g: torch.randint_like(p, 10),
    "dropout": lambda p, g: functional.dropout(p, 0.5),
    "bernoulli": lambda p, g: torch.bernoulli(p.detach().sigmoid()),
    "poisson": lambda p, g: torch.poisson(p.detach().abs()),
    "normal": lambda p, g: torch.normal(p.detach(), p.detach().abs()),
    "like a sum": lambda p, g: torch.randn_like(p.detach().sum(0)) if p.dim() else None,
    "of a sum": lambda p, g: p.detach().sum(-1).normal_() if p.dim() else None,
    "of a gradient": lambda p, g: p.grad + torch.randn_like(p.grad),
}  # fmt: skip


class _Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(32, 4)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def _model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 32), _Scaled())


_CUT = {
    "0": ColwiseParallel(output_layouts=Replicate()),
    "1": RowwiseParallel(input_layouts=Replicate()),
}
"""How the ranks of "tp" share the first two layers, unevenly."""


def _pair(mesh: DeviceMesh, tp: int = 1, **options: Any) -> tuple[nn.Module, nn.Module]:
    whole, sharded, inner = _model(), _model(), mesh
    if tp > 1:
        made = fcdp_compile.make_mesh(nodes=mesh.size(0), tp=tp)
        assert made is not None
        inner, sharded = made, parallelize_module(sharded, made["tp"], _CUT)
    fcdp_compile.shard(sharded, inner, **options)
    for model in (whole, sharded):
        model(torch.ones(3, 7)).square().sum().backward()
    for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
        a.grad = _value(b.grad).to(a.device)  # equal to the last bit
    return whole, sharded


def _value(tensor: Any) -> Tensor:
    tensor = (
        tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
    )
    return tensor.detach().cpu().clone()


def _differences(models: tuple[nn.Module, nn.Module], acts: dict[str, Act]) -> list[str]:
    """The names of what gives the two models other values, or leaves other generators."""
    wrong = []
    for name, act in acts.items():
        found = []
        for model in models:
            torch.manual_seed(3)
            generator = seeded(5)
            given = [(p, act(p, generator)) for p in model.parameters()]
            values = [_value(p if made is None else made) for p, made in given]
            found.append([*values, *(_value(p) for p, _ in given)])
            current_device().synchronize()  # kernels draw when they run
            found[-1] += [torch.get_rng_state(), generator.get_state()]
        if not all(map(torch.equal, *found)):
            wrong.append(name)
    return wrong


def _draws(mesh: DeviceMesh, options: dict[str, Any]) -> list[str]:
    return _differences(_pair(mesh, **options), DRAWS)


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        pytest.param({}, 2, marks=pytest.mark.slow),
        pytest.param({"strategy": "ddp"}, 2, marks=pytest.mark.slow),
        # Tensors on the host draw from the host's generator.
        pytest.param({"offload_params": True}, 2, marks=[pytest.mark.cpu, pytest.mark.slow]),
        ({"strategy": "fcdp+matrix"}, 1),
        pytest.param({"tp": 2}, 2, marks=pytest.mark.slow),
    ],
)
def test_random_numbers_are_those_of_the_whole_model(options: dict[str, Any], nodes: int) -> None:
    assert run(_draws, options, nodes=nodes, ranks_per_node=2) == [[]] * 2 * nodes


def _rows(p: Any) -> Tensor:
    return torch.arange(p.numel()).view(p.shape) % 3 == 0


def _numbers(mask: Any) -> Tensor:
    return torch.arange(float(mask.sum().item()))


def _put(change: Callable[[Any], Any]) -> Act:
    """Make a check of what changes a parameter, and then its gradient."""

    @torch.no_grad()
    def act(p: Any, generator: torch.Generator) -> Any:
        change(p)
        change(p.grad)
        return p.grad

    return act


def _assign(index: Callable[[Any], Any], value: Callable[[Any], Any]) -> Act:
    def change(p: Any) -> None:
        if p.dim():
            p[index(p)] = value(p)

    return _put(change)


def _read(make: Callable[[Any], Any]) -> Act:
    @torch.no_grad()
    def act(p: Any, generator: torch.Generator) -> Any:
        return make(p.grad) if p.dim() else None

    return act


MEETINGS: dict[str, Act] = {
    "rows": _assign(lambda p: slice(0, 3), lambda p: 0),
    "rows from rows": _assign(lambda p: slice(0, 2), lambda p: p.detach().clone()[1:3]),
    "mask of rows": _assign(lambda p: torch.arange(len(p)) < 2, lambda p: p.detach().clone()[:2]),
    "mask": _assign(_rows, lambda p: 2.0),
    "own mask": _assign(lambda p: p > 0, lambda p: 1.0),
    "own mask, from values": _assign(lambda p: p > 0, lambda p: _numbers(p > 0)),
    "index_put_": _put(lambda p: p.index_put_((p > 0,), _numbers(p > 0)) if p.dim() else None),
    "last": _assign(lambda p: (..., -1), lambda p: 5),
    "numbers": _assign(lambda p: torch.tensor([2, 0]), lambda p: torch.ones(2, *p.shape[1:])),
    "copy_": _put(lambda p: p.copy_(torch.full(p.shape, 2.0))),
    "mul_ a mask": _put(lambda p: p.mul_(_rows(p))),
    "mul_ a column": _put(lambda p: p.mul_(torch.ones(p.shape[:1] + (1,) * (p.dim() - 1)))),
    "masked_fill_": _put(lambda p: p.masked_fill_(_rows(p), 3)),
    "lists": _put(lambda p: torch._foreach_mul_([p], [_rows(p).float()])),
    "index_fill_": _assign(lambda p: ..., lambda p: p.clone().index_fill_(0, torch.tensor([1]), 7)),
    "product": _read(lambda p: p * _rows(p)),
    "reversed product": _read(lambda p: _rows(p) * p),
    "where": _read(lambda p: torch.where(_rows(p), p, torch.zeros(p.shape))),
    "taken rows": _read(lambda p: p[torch.tensor([1, 0])]),
    "taken by a mask": _read(lambda p: p[_rows(p)]),
    "matmul": _read(lambda p: torch.ones(3, len(p)) @ p),
    "out": _read(lambda p: torch.add(p, 1, out=torch.empty_like(p))),
    "out that is read": _put(lambda p: torch.add(p.data, p.data, alpha=2, out=p.data)),
    "out read by another name": _put(lambda p: torch.cumsum(held := p.detach(), 0, out=held)),
    "two outs": _read(lambda p: torch.sort(p, 0, out=(p, torch.zeros_like(p, dtype=torch.long)))[0]),
    "mean loss": _read(lambda p: functional.mse_loss(p, p * p)),
    "unsqueeze_": _read(lambda p: p.clone().unsqueeze_(0).squeeze_(0).t_() * 2),
    "out of whole values": _read(lambda p: torch.cumsum(p, 0, out=torch.zeros_like(p))),
    "list": _read(lambda p: torch.tensor(p.tolist())),
    "no rule": _read(lambda p: torch.trapezoid(p, dim=0)),
}  # fmt: skip


def _eye(p: Any, generator: torch.Generator) -> Any:
    if p.dim() < 2:
        return None
    square = p @ p.T
    return (square - torch.eye(*square.shape, out=torch.empty_like(square))).sum(0)


def _refusals(mesh: DeviceMesh, sharded: Any) -> None:
    weight, grad = sharded[1].weight, sharded[1].weight.grad
    with pytest.raises(FcdpError, match=r"tensor\[rows\] = values"):
        grad[:3].zero_()
    with pytest.raises(FcdpError, match="autograd records"):
        weight[0] = 0
    with pytest.raises(FcdpError, match="the shape"):
        torch.add(grad, 1, out=torch.empty_like(sharded[0].weight.grad))
    with pytest.raises(FcdpError, match="would change the shape"), torch.no_grad():
        weight.t_()
    with pytest.raises(FcdpError, match="not reduced yet"):
        f"{grad.sum():.3f}"
    read = weight.detach().redistribute(placements=[Replicate()] * 2, forward_dtype=torch.bfloat16)
    assert read.dtype is torch.bfloat16
    norm = nn.utils.clip_grad_norm_(sharded.parameters(), 1e9)
    assert f"{norm:.3f}" == f"{norm.item():.3f}"
    with pytest.raises(MixedTensorsError, match="which it writes to"):
        torch.zeros(grad.shape).add_(grad)
    narrow = fcdp_compile.shard(nn.Linear(8, 4), mesh).weight.detach()
    local = narrow.to_local().clone()
    assert len(local) == 1
    with pytest.raises(MixedTensorsError, match="one rank's part"):
        narrow.add_(local)


class _Looks(nn.Linear):
    """Sees whether a gathered parameter lives on after nobody uses it any more."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__(7, 13)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.lives = weakref.ref(self.weight)() is not None
        self.change(self.weight)
        return super().forward(x)


def _meetings(mesh: DeviceMesh) -> list[str]:
    models = _pair(mesh)
    found = _differences(models, MEETINGS)
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        made = [_eye(p, torch.default_generator) for p in (a, b)]
        if made[0] is not None and not torch.allclose(*map(_value, made), atol=1e-5):
            found.append("eye")
    _refusals(mesh, models[1])
    looks, writes = (fcdp_compile.shard(_Looks(c), mesh) for c in (Tensor.dim, Tensor.zero_))
    with torch.no_grad():
        looks(torch.ones(3, 7))
        with pytest.raises(FcdpError, match=r"'weight'.*would be lost"):
            writes(torch.ones(3, 7))
    if looks.lives or writes.lives:
        found.append("a dropped parameter")
    return found


def test_plain_tensors_meet_parameters_and_gradients() -> None:
    assert run(_meetings, nodes=2, ranks_per_node=2) == [[]] * 4


def _hooked(seen: list[Any]) -> tuple[nn.Module, Any]:
    model: Any = _model()
    twice = nn.Linear(13, 13)  # its gradient is a sum
    model.insert(1, twice)
    model.insert(1, twice)
    mask = torch.arange(13)[:, None] > 4
    model[0].weight.register_hook(lambda g: g * mask)
    twice.weight.register_hook(lambda g: (g * mask).masked_fill_(mask.T, 2) + torch.randn_like(g))
    handle = model[3].weight.register_hook(lambda g: g * 3)

    def after(p: Any) -> None:
        seen.append(p)
        p.grad.mul_(5)

    model[4].weight.register_post_accumulate_grad_hook(after)
    return model, handle


def hooks_stay(mesh: DeviceMesh | None, backend: str | None) -> None:
    """Gradients of a sharded model with hooks from before are those of a whole one; handles remove hooks."""
    seen: list[Any] = []
    whole, handle = _hooked([])
    sharded, sharded_handle = _hooked(seen)
    fcdp_compile.shard(sharded, mesh)
    called = torch.compile(sharded, backend=backend) if backend else sharded
    for _ in range(2):
        for model, call in ((whole, whole), (sharded, called)):
            model.zero_grad()
            torch.manual_seed(5)
            call(torch.ones(3, 7)).square().sum().backward()
        for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
            if a.grad is not None:
                assert b.grad is not None
                torch.testing.assert_close(_value(b.grad), _value(a.grad))
        handle.remove()
        sharded_handle.remove()
    assert len(seen) == 2
    assert seen[0] is sharded[4].weight


@pytest.mark.parametrize("backend", quick([None, "fcdp"], "fcdp"))
def test_hooks_that_were_set_before_shard(backend: str | None) -> None:
    run(hooks_stay, backend, nodes=2, ranks_per_node=2)


def test_hooks_that_were_set_before_shard_in_one_process() -> None:
    hooks_stay(None, None)
