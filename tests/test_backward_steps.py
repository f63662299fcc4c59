"""Parameters that are stepped while the backward still runs, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

import fcdp_compile
from fcdp_compile.errors import ArgumentError, FcdpError
from tests.offloaded import TINY, sharded, train


def in_backward(model: nn.Module) -> Optimizer:
    return fcdp_compile.offload(AdamW(model.parameters()), bucket_mb=TINY, in_backward=True)


def test_a_backward_steps_all_but_the_bucket_whose_states_load() -> None:
    model, optimizer = sharded(), None
    optimizer = in_backward(model)
    train(model, optimizer, range(1, 3))
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 5)).square().mean().backward()
    changed = sum(
        not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)
    )
    optimizer.step()
    after = sum(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert 0 < changed < after == sum(p.numel() > 0 for p in model.parameters())


def _drop(model: nn.Module, _: Any) -> None:
    model.zero_grad()


def _clip(model: nn.Module, _: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _slow(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_drop, r"gradient of parameter '\S+' was changed after the backward"),
        (_clip, r"gradient of parameter '\S+' was changed after the backward"),
        (_slow, r"a setting of the optimizer's groups, such as lr, was changed"),
    ],
)
def test_what_changes_after_a_step_in_the_backward_is_refused(
    change: Callable[[nn.Module, Any], None], match: str
) -> None:
    model = sharded()
    optimizer = in_backward(model)
    train(model, optimizer, range(1, 3))
    model(torch.randn(4, 5)).square().mean().backward()
    with pytest.raises(FcdpError, match="loading an optimizer's states between a backward and"):
        optimizer.load_state_dict(optimizer.state_dict())
    change(model, optimizer)
    with pytest.raises(FcdpError, match=match):
        optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, [1])
    model(torch.randn(4, 5)).square().mean().backward()
    with pytest.raises(FcdpError, match=r"second backward reached parameter '\S+', which the one"):
        model(torch.randn(4, 5)).square().mean().backward()


def test_what_cannot_step_in_the_backward() -> None:
    for make, step_on in ((torch.optim.Muon, "gpu"), (torch.optim.Adafactor, "gpu"), (Adam, "cpu")):
        matrices = [p for p in sharded().parameters() if p.dim() == 2]
        with pytest.raises(ArgumentError, match="leave in_backward out"):
            fcdp_compile.offload(make(matrices), step_on, in_backward=True)  # type: ignore[operator]
