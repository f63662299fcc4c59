"""A model of many kinds of parameters, and optimizers whose states are on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import fcdp_compile

TINY = 1e-5
"""MiB of a bucket, so that most parameters are alone in theirs."""


class Net(nn.Module):
    """Matrices, vectors, a scalar, a parameter without elements and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 9), nn.Linear(9, 3)
        self.sometimes = nn.Linear(9, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 5))

    def forward(self, x: Tensor, *, uses_all: bool = True) -> Tensor:
        hidden = self.first(x).tanh()
        found: Tensor = self.second(hidden) * self.scale
        return found + self.sometimes(hidden) if uses_all else found


def sharded() -> Net:
    return fcdp_compile.shard(Net(), fcdp_compile.make_mesh())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [
        {"params": matrices, "lr": 0.02},
        {"params": [p for p in model.parameters() if p.dim() != 2]},
    ]


MAKERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "AdamW": partial(AdamW, lr=0.01),
    "AdamW with amsgrad": partial(AdamW, lr=0.01, amsgrad=True),
    "fused Adam": partial(Adam, lr=0.01, fused=True),
    "SGD": partial(SGD, lr=0.01, momentum=0.9),
    "SGD without states": partial(SGD, lr=0.01),
}


def train(
    model: nn.Module, optimizer: Optimizer, steps: Iterable[int], scheduler: Any = None
) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(4, 5), uses_all=step % 3 > 0).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def assert_same(one: nn.Module, other: nn.Module, *, exact: bool = True) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert _are_same(p, q, exact=exact), name


def _are_same(one: Tensor, other: Tensor, *, exact: bool) -> bool:
    return torch.equal(one, other) if exact else torch.allclose(one, other, atol=1e-7)


def assert_same_states(one: Optimizer, other: Optimizer, *, exact: bool = True) -> None:
    mine, others = one.state_dict(), other.state_dict()
    assert mine["param_groups"] == others["param_groups"]
    assert mine["state"].keys() == others["state"].keys()
    for index, states in mine["state"].items():
        for key, value in states.items():
            found = others["state"][index][key]
            if isinstance(value, Tensor):
                assert _are_same(value, found, exact=exact), (index, key)
            else:
                assert value == found, (index, key)
