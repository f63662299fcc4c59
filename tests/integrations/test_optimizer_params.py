"""An optimizer that was built before `shard` gets the sharded parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fcdp_compile
from fcdp_compile.integrations.optimizer_params import sharded_within


def _tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[1].weight = model[0].weight
    return model


def _trained(build_first: bool, optimizer_class: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model, other = _tied(), nn.Linear(4, 1)

    def build() -> torch.optim.Optimizer:
        if optimizer_class is torch.optim.LBFGS:
            return torch.optim.LBFGS([*model.parameters(), *other.parameters()])
        groups = [
            {"params": list(model[0].named_parameters()), "lr": 0.5},
            {"params": [*model[2].named_parameters("norm"), *other.named_parameters("head")]},
        ]
        return optimizer_class(groups, lr=0.1)

    if build_first:
        optimizer = build()
        with sharded_within([optimizer], model):
            fcdp_compile.shard(model)
        with sharded_within([optimizer], model):
            pass  # a second time changes nothing
    else:
        fcdp_compile.shard(model)
        optimizer = build()
    inputs = torch.rand(8, 4)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found: torch.Tensor = other(model(inputs)).square().mean()
        found.backward()
        return found

    for _ in range(3):
        optimizer.step(loss)
    return [p.detach().clone() for p in (*model.parameters(), *other.parameters())]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
def test_an_optimizer_built_before_trains_as_one_built_after(
    kind: type[torch.optim.Optimizer],
) -> None:
    for mine, expected in zip(_trained(True, kind), _trained(False, kind), strict=True):
        assert torch.equal(mine, expected)


def test_names_in_groups_stay_with_their_parameters() -> None:
    model = _tied()
    optimizer = torch.optim.AdamW(model.named_parameters())
    with sharded_within([optimizer], model):
        fcdp_compile.shard(model)
    (group,) = optimizer.param_groups
    assert dict(zip(group["param_names"], group["params"], strict=True)) == dict(
        model.named_parameters()
    )


def test_states_are_refused() -> None:
    model = _tied()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    told = r"AdamW has a state of parameter '0\.weight', .*build the"
    with pytest.raises(ValueError, match=told), sharded_within([optimizer], model):
        raise AssertionError("it is refused before the model is sharded")
