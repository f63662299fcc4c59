"""`no_sync` with anything between micro-batches: the result is right, or every rank refuses."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fcdp_compile
from fcdp_compile import FcdpError, Strategy
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.strategy import GradientOn
from tests.distributed.beside import Beside
from tests.distributed.models import CASES, Case, Odd, batch
from tests.distributed.ranks import run

pytestmark = [pytest.mark.distributed, pytest.mark.rare]


class Tiny(Odd):
    """One parameter has fewer elements than ranks, a forward uses one of two halves, and a backward may fail
    at a graph break.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tiny = nn.Parameter(torch.ones(2))
        self.other = nn.Linear(7, 7)
        self.takes_other = False
        self.fails = False

    def block(self, hidden: Tensor) -> Tensor:
        hidden = hidden * self.tiny.sum()
        if self.takes_other:
            return hidden + self.other(hidden)
        return super().block(self._breaks(hidden))

    @torch._dynamo.disable
    def _breaks(self, hidden: Tensor) -> Tensor:
        if self.fails:
            hidden.register_hook(_fail)
        return hidden


def _fail(grad: Tensor) -> None:
    raise ZeroDivisionError


class Nested(nn.Module):
    """Two tied ends, and between them a compiled part whose backward is nested in the ends' backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self._checkpointed(self.embedding(ids)) @ self.embedding.weight.t()

    @torch._dynamo.disable(recursive=False)
    def _checkpointed(self, hidden: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.piece, hidden, use_reentrant=True)
        return found

    def piece(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden))


TINY, NESTED = (replace(CASES["odd"], model=model) for model in (Tiny, Nested))


def _pair(mesh: DeviceMesh, case: Case, place: str = "gpu", strategy: str = "fcdp") -> Beside:
    chosen = replace(Strategy.parse(strategy), gradient_on=GradientOn(place))
    return Beside(mesh, case, strategy=chosen)


def _backward(pair: Beside, *, synchronises: bool = False, plain: bool = True) -> None:
    with nullcontext() if synchronises else fcdp_compile.no_sync(pair.model):
        pair.case.loss(pair.net, pair.data(pair.step)).backward()
    if plain:
        pair.plain_backward(pair.step)
    pair.step += 1


def _finish(pair: Beside) -> None:
    _backward(pair, synchronises=True)
    pair.compare_gradients()
    pair.optimize()


def _each(pair: Beside, act: Callable[[Any], object]) -> None:
    for model in pair.both:
        act(model)


# --- right in the end ---------------------------------------------------------------------------------


def _parts_used_in_turn(mesh: DeviceMesh, place: str) -> None:
    """Parameters that the last micro-batch does not use are synchronised, too."""
    one_node = mesh.size(0) == 1
    for strategy in (
        "zero1" if place == "host" else "fcdp",
        "ddp",
        "zero1" if one_node else "mics",
    ):
        pair = _pair(mesh, TINY, place, strategy)
        for _ in range(2):
            for takes_other in (False, True, False):
                _each(pair, lambda model: setattr(model, "takes_other", takes_other))  # noqa: B023
                _backward(pair)
            _each(pair, lambda model: setattr(model, "takes_other", True))
            _finish(pair)


def _frozen_between(mesh: DeviceMesh, place: str) -> None:
    pair = _pair(mesh, CASES["odd"], place)
    _backward(pair)
    _each(pair, lambda model: model.first.weight.requires_grad_(False))
    _backward(pair)
    _finish(pair)


def _cleared_where_some_ranks_have_nothing(mesh: DeviceMesh, place: str) -> None:
    pair = _pair(mesh, TINY, place)
    for _ in range(2):
        _backward(pair)
        _each(pair, lambda model: model.tiny.grad.zero_())
        _backward(pair)
        _finish(pair)


def _cleared_when_zero(mesh: DeviceMesh, place: str) -> None:
    pair = _pair(mesh, CASES["odd"], place)
    _backward(pair, synchronises=True)
    for _ in range(2):
        _each(pair, lambda model: model.zero_grad(set_to_none=False))
        _backward(pair)
    _each(pair, lambda model: model.zero_grad(set_to_none=False))
    _finish(pair)


def _nested(mesh: DeviceMesh, place: str) -> None:
    pair = _pair(mesh, NESTED, place)
    pair.model.piece = torch.compile(pair.model.piece, backend="fcdp")
    for _ in range(2):
        _backward(pair)
        _backward(pair)
        _finish(pair)


def _in_and_outside_at_once(mesh: DeviceMesh, place: str) -> None:
    """Code that is not compiled adds to `.grad` in every micro-batch, too."""
    pair = _pair(mesh, CASES["odd"], place)
    for order in (1, -1):
        with fcdp_compile.no_sync(pair.model):
            first = pair.case.loss(pair.net, pair.data(0))
            eager = pair.case.loss(pair.model, pair.data(1))
            (pair.case.loss(pair.net, pair.data(2)) + eager).backward()
        losses = [first, pair.case.loss(pair.net, pair.data(3))]
        sum(losses[::order]).backward()
        pair.plain_backward(0, 1, 2, 3)
        _finish(pair)


def _other_lengths_and_evaluation(mesh: DeviceMesh, place: str) -> None:
    pair = _pair(mesh, CASES["broken"], place)

    def loss(net: Any, length: int, rank: int) -> Tensor:
        return pair.case.loss(net, batch(pair.case, step=pair.step, rank=rank, length=length))

    for length in (16, 9, 5, 12):
        with nullcontext() if length == 12 else fcdp_compile.no_sync(pair.model):
            loss(pair.net, length, pair.rank).backward()
            with torch.no_grad():
                pair.net(pair.data(0))
        for rank in range(pair.world):
            (loss(pair.plain, length, rank) / pair.world).backward()
    pair.compare_gradients()
    pair.optimize()


def _two_models_and_a_scaler(mesh: DeviceMesh, place: str) -> None:
    pairs = [_pair(mesh, CASES[name], place) for name in ("odd", "floats")]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        for i in range(3):
            with ExitStack() as stack:
                for pair in pairs[: 0 if i == 2 else 2]:
                    stack.enter_context(fcdp_compile.no_sync(pair.model))
                losses = [p.case.loss(p.net, p.data(i)) for p in pairs]
                scaler.scale(sum(losses)).backward()
            for pair in pairs:
                pair.plain_backward(i)
        for pair in pairs:
            scaler.unscale_(pair.optimizer)
            pair.compare_gradients()
            scaler.step(pair.optimizer)
            pair.plain_optimizer.step()
            _each(pair, lambda model: model.zero_grad())
        scaler.update()
    for pair in pairs:
        pair.compare_parameters()


def _memory_is_given_back(mesh: DeviceMesh, place: str) -> None:
    pair = _pair(mesh, CASES["odd"], place)
    _backward(pair)
    state = state_of(pair.model)
    alive = [weakref.ref(state)]
    alive += [weakref.ref(w.kept) for w in state.accumulation._waiting.values()]
    del pair, state
    gc.collect()
    assert [a() for a in alive] == [None] * len(alive)


RIGHT = [
    _parts_used_in_turn,
    _frozen_between,
    _cleared_where_some_ranks_have_nothing,
    _cleared_when_zero,
    _nested,
    _in_and_outside_at_once,
    _other_lengths_and_evaluation,
    _two_models_and_a_scaler,
    _memory_is_given_back,
]


def _all(mesh: DeviceMesh, cases: list[Callable[..., None]]) -> None:
    for i, case in enumerate(cases):
        try:
            case(mesh, ("gpu", "host")[i % 2])
        except Exception as error:  # any error is raised again, with the name of its case
            raise AssertionError(case.__name__.replace("_", " ")) from error


def test_gradients_are_right_whatever_comes_between() -> None:
    run(_all, RIGHT, nodes=2, ranks_per_node=2)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 1), (1, 2)])
def test_also_with_one_rank_a_node_or_one_node(nodes: int, ranks_per_node: int) -> None:
    run(_all, RIGHT[:2], nodes=nodes, ranks_per_node=ranks_per_node)


# --- refused --------------------------------------------------------------------------------------------


def _refused(pair: Beside, act: Callable[[], object]) -> str:
    """Return the message of the refusal; after gradients are cleared, all must work again."""
    with pytest.raises(FcdpError) as caught:
        act()
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.zero_grad()
    _backward(pair)
    _finish(pair)
    return str(caught.value)


def _refusals(mesh: DeviceMesh) -> dict[str, str]:
    found = {}
    pair = _pair(mesh, TINY)
    for synchronises in (False, True):
        _backward(pair)
        pair.model.fails = True
        with pytest.raises(ZeroDivisionError):
            _backward(pair, synchronises=synchronises, plain=False)
        pair.model.fails = False
        kind = "synchronising" if synchronises else "accumulating"
        found[f"{kind} fails"] = _refused(pair, lambda: _backward(pair, synchronises=True))

    _backward(pair)
    loss = pair.case.loss(pair.net, pair.data(0))
    found["autograd.grad"] = _refused(pair, lambda: torch.autograd.grad(loss, pair.model.tiny))

    _backward(pair)
    bystander = torch.optim.SGD([nn.Parameter(torch.ones(()))])
    if dist.get_rank() == 1:
        pair.model.scale.grad.to_local().add_(1)
        bystander.step()  # its step asks no other rank
    found["changed on one rank"] = _refused(pair, lambda: _backward(pair, synchronises=True))

    pair.model.scale.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(FcdpError) as caught:
        fcdp_compile.no_sync(pair.model).__enter__()
    found["hook"] = str(caught.value)
    return found


def test_what_cannot_be_right_is_refused_by_every_rank() -> None:
    for found in run(_refusals, nodes=2, ranks_per_node=2):
        for kind in ("synchronising", "accumulating"):
            assert "clear all gradients (optimizer.zero_grad())" in found[f"{kind} fails"]
        assert "not torch.autograd.grad" in found["autograd.grad"]
        assert "gradient of parameter 'scale' was changed" in found["changed on one rank"]
        assert "has a gradient hook" in found["hook"]
