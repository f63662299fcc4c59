"""Models built on meta in one process: none runs without values, and materialize gives those of a build."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError
from tests.distributed.deferred import (
    SAME,
    Make,
    TiedHead,
    adapted,
    built,
    expect,
    lora,
    memory,
)
from tests.distributed.jobs import message_of
from tests.distributed.models import Floats, Odd, gpt2, llama


@pytest.mark.parametrize("name", SAME)
def test_values_are_those_of_an_unsharded_build(name: str) -> None:
    torch.manual_seed(0)
    plain = SAME[name]()
    after = torch.get_rng_state()
    model = built(SAME[name], None)
    expect(model, plain)
    if name != "ia3":  # IA3's constructor draws values and then overwrites them
        assert torch.equal(torch.get_rng_state(), after)


def test_marks_and_ties_stay() -> None:
    model: Any = built(TiedHead, None)
    assert model.head._parameters["weight"] is model.embedding._parameters["weight"]
    assert model.embedding.weight.note == "kept"
    assert not model.embedding.weight[3].any()


def test_all_without_an_initialisation_are_named_and_nothing_changes() -> None:
    with torch.device("meta"):
        model = fcdp_compile.shard(nn.Sequential(nn.Linear(2, 2), Odd(), Floats()))
    state = torch.get_rng_state()
    found = message_of(FcdpError, lambda: fcdp_compile.materialize(model))
    assert "1.scale (Odd), 2.mean (Floats) are without an initialisation" in found
    assert torch.equal(torch.get_rng_state(), state)
    assert "0.weight" in message_of(FcdpError, lambda: model(torch.ones(2, 2)))


class _Half(nn.Linear):
    """Sets half of its weight."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight[:1])
        nn.init.zeros_(self.bias)


class _Failing(nn.Linear):
    """Fails when there is memory to initialise."""

    is_built = False

    def reset_parameters(self) -> None:
        if self.is_built:
            raise ArithmeticError("no luck")


class _Attribute(nn.Linear):
    """Has a tensor that is neither parameter nor buffer."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.table = torch.ones(3)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (partial(_Half, 2, 2), "weight is not set, or not everywhere"),
        (partial(_Attribute, 2, 2), "table is on meta and neither a parameter nor a buffer"),
        (
            partial(adapted, llama, lora(init_lora_weights="olora")),
            "has init_lora_weights='olora', which computes it from the values",
        ),
    ],
)
def test_what_cannot_be_materialized(make: Make, what: str) -> None:
    if "olora" in what:
        # PEFT itself cannot factorise a matrix without values.
        with torch.device("meta"):
            model = adapted(llama, lora())
        model.peft_config["default"].init_lora_weights = "olora"
    else:
        with torch.device("meta"):
            model = make()
    model = fcdp_compile.shard(model)
    assert what in message_of(FcdpError, lambda: fcdp_compile.materialize(model))
    assert state_of(model).unset.keys


class _SetsBelow(nn.Module):
    """Sets another module's values in a way that cannot be followed without values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.scale, self.how = nn.Linear(3, 3), nn.Parameter(torch.empty(1)), how
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        weight = self.inner.weight
        if self.how == "by .data":
            wide = nn.init.trunc_normal_(weight.data.to(torch.float64), std=7.0)
            weight.data = wide.to(weight.dtype)
        elif self.scale.is_meta or self.scale.item() == 1:
            nn.init.zeros_(weight)


@pytest.mark.parametrize("how", ["by .data", "if a value says so"])
def test_values_of_modules_below_are_set_too(how: str) -> None:
    model = built(lambda: _SetsBelow(how), None)
    torch.manual_seed(0)
    expect(model, _SetsBelow(how))


class _SetsBeside(nn.Linear):
    """Sets another module's values if one of its own values says so."""

    beside: nn.Linear

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)
        if not self.bias.is_meta and self.bias.sum().item() > 0:
            nn.init.zeros_(self.beside.weight)


def test_values_of_modules_beside_are_set_too() -> None:
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(2, 2), _SetsBeside(2, 2))
    vars(plain[1])["beside"] = plain[0]
    model: Any = fcdp_compile.shard(plain)
    torch.manual_seed(0)
    fcdp_compile.materialize(model)
    torch.manual_seed(0)
    other = nn.Linear(2, 2)
    assert torch.equal(model[0].bias, other.bias), "the run that was thrown away drew nothing"
    assert not model[0].weight.any()
    assert bool((model[1].weight == 1).all())


def test_a_failing_initialisation_is_named() -> None:
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(2, 2), _Failing(2, 2))
    model: Any = fcdp_compile.shard(plain)
    model[1].is_built = True
    state = torch.get_rng_state()
    found = message_of(FcdpError, lambda: fcdp_compile.materialize(model))
    assert "_Failing.reset_parameters of 1 failed: no luck" in found
    assert torch.equal(torch.get_rng_state(), state)
    assert type(model[0]._parameters["weight"]) is nn.Parameter
    assert "0.weight" in message_of(FcdpError, lambda: model(torch.ones(2, 2)))


def test_ignored_parameters_cannot_be_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'0.weight' is in ignored_params and on meta"):
        fcdp_compile.shard(model, ignored_params=[model[0].weight])


def test_what_has_values_keeps_them() -> None:
    with torch.device("meta"):
        head = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    body = nn.BatchNorm1d(3)
    nn.init.constant_(body.running_mean, 5.0)  # type: ignore[arg-type]
    body.weight = head[1].weight  # on meta, in a module that has the rest
    model = nn.Sequential(body, head[0])
    model = fcdp_compile.shard(model)
    fcdp_compile.materialize(model)
    assert bool((body.running_mean == 5.0).all())  # type: ignore[union-attr]
    assert torch.equal(body.weight.detach(), torch.ones(3))
    before = [p.detach().clone() for p in model.parameters()]
    fcdp_compile.materialize(model)  # nothing to do
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a, b.detach())


class TestLoading:
    """load_state_dict gives values to the parameters that it loads, of the model or of a part."""

    def _pair(self) -> tuple[Any, nn.Module]:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        return fcdp_compile.shard(model), nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))

    def test_of_a_module_and_then_the_rest(self) -> None:
        model, plain = self._pair()
        model[0].load_state_dict(plain[0].state_dict())  # type: ignore[index]
        assert {k.partition(":")[2] for k in state_of(model).unset.keys} == {"1.weight", "1.bias"}
        rest = {k: v for k, v in plain.state_dict().items() if k.startswith("1.")}
        model.load_state_dict(rest, strict=False)
        assert not state_of(model).unset
        inputs = torch.rand(3, 4)
        torch.testing.assert_close(model(inputs), plain(inputs))

    def test_with_assign_writes_to_the_parameters(self) -> None:
        """As on several ranks; torch would replace the parameters by others that no optimizer has."""
        model, plain = self._pair()
        before = list(model.parameters())
        model.load_state_dict({k: v.double() for k, v in plain.state_dict().items()}, assign=True)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        assert not state_of(model).unset

    def test_that_fails_gives_none(self) -> None:
        model, plain = self._pair()
        bad = plain.state_dict() | {"0.weight": torch.zeros(9)}
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict(bad)
        assert "m" in next(iter(state_of(model).unset.keys))
        assert len(state_of(model).unset.names()) == 7

    def test_writing_by_hand_does_not_count(self) -> None:
        model, _ = self._pair()
        for parameter in model.parameters():
            parameter.data.zero_()
        found = message_of(FcdpError, lambda: model(torch.ones(2, 4)))
        assert "are written into a parameter by hand do not count" in found

    def test_an_optimizer_step_is_refused(self) -> None:
        model, _ = self._pair()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        assert "an optimizer step needs the values of '0.weight'" in message_of(
            FcdpError, optimizer.step
        )
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
        other.step()


def test_no_more_memory_than_the_largest_module() -> None:
    memory(None)


def test_gpt2_is_initialised_as_its_config_says() -> None:
    """Its constructor draws in another order: the values differ, but have equal distributions."""
    torch.manual_seed(0)
    plain = gpt2()
    model = built(gpt2, None)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        a, b = mine.detach(), other.detach()
        if b.std() == 0:
            assert torch.equal(a, b), name
        else:
            assert abs(a.std() / b.std() - 1) < 0.1, name
