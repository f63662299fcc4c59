"""Changes between a forward and its backward: the gradient belongs to the forward's values, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.errors import StaleParameterError
from tests.distributed.beside import Beside, named
from tests.distributed.models import CASES
from tests.distributed.ranks import run
from tests.marks import quick

pytestmark = pytest.mark.distributed

STRATEGIES = ("zero3", "zero++", "fcdp")
_OPTIONS = {"bucket_mb": 300 / 2**20}  # several buckets


def _fresh(pair: Beside) -> None:
    """Train on, so that leftovers of a case do not matter."""
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        optimizer.zero_grad()
    pair.train(2)
    pair.compare_parameters()


def _loss(pair: Beside, step: int) -> Tensor:
    return pair.case.loss(pair.net, pair.data(step))


def _gradients_at_forward(pair: Beside, *steps: int) -> None:
    pair.plain_optimizer.zero_grad()
    pair.plain_backward(*steps)


def _plain_values(pair: Beside) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in pair.plain.named_parameters()}


def _set_plain(pair: Beside, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in pair.plain.named_parameters():
            parameter.copy_(values[name])


def _backward(pair: Beside, loss: Tensor, step: int, seen: dict[str, Tensor]) -> str:
    """Run a backward; returns "raised", or "forward" if the gradient fits `seen`, the forward's values."""
    now = _plain_values(pair)
    try:
        loss.backward()
    except StaleParameterError:
        pair.optimizer.zero_grad()
        return "raised"
    _set_plain(pair, seen)
    _gradients_at_forward(pair, step)
    pair.compare_gradients()
    _set_plain(pair, now)
    return "forward"


def _step_between(pair: Beside) -> str:
    """An optimizer step between forward and backward."""
    loss = _loss(pair, 50)
    loss.backward()
    pair.plain_backward(50)
    loss = _loss(pair, 51)
    seen = _plain_values(pair)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    pair.plain_optimizer.step()
    verdict = _backward(pair, loss, 51, seen)
    _fresh(pair)
    return verdict


def _edit_between(pair: Beside, with_second_forward: bool) -> str:
    """An edit that no version counter sees."""
    seen = _plain_values(pair)
    loss = _loss(pair, 52)
    for model in pair.both:
        named(model, "norm.weight").data.mul_(2.0)
    if with_second_forward:
        _loss(pair, 53)
    verdict = _backward(pair, loss, 52, seen)
    _fresh(pair)
    return verdict


def _two_backwards(pair: Beside, *, first_first: bool) -> None:
    losses = [_loss(pair, 54), _loss(pair, 55)]
    for loss in losses if first_first else reversed(losses):
        loss.backward()
    _gradients_at_forward(pair, 54, 55)
    pair.compare_gradients()
    _fresh(pair)


def _twice_in_one_loss(pair: Beside) -> None:
    (_loss(pair, 56) + _loss(pair, 57)).backward()
    _gradients_at_forward(pair, 56, 57)
    pair.compare_gradients()
    _fresh(pair)


def _forward_alone(pair: Beside) -> None:
    _loss(pair, 58)
    _loss(pair, 59)
    _fresh(pair)


def _older_backward(pair: Beside) -> str:
    """Forward, step, forward, and then the first forward's backward."""
    older = _loss(pair, 60)
    _loss(pair, 61).backward()
    pair.plain_backward(61)
    seen = _plain_values(pair)
    pair.optimize()
    newer = _loss(pair, 62)
    verdict = _backward(pair, older, 60, seen)
    pair.optimizer.zero_grad()
    newer.backward()
    _gradients_at_forward(pair, 62)
    pair.compare_gradients()
    _fresh(pair)
    return verdict


def _between(mesh: DeviceMesh, name: str, strategy: str) -> dict[str, str]:
    pair = Beside(mesh, CASES[name], strategy=strategy, options=_OPTIONS)
    pair.train(2)
    _two_backwards(pair, first_first=True)
    _two_backwards(pair, first_first=False)
    _twice_in_one_loss(pair)
    _forward_alone(pair)
    return {
        "step": _step_between(pair),
        "older backward": _older_backward(pair),
        "edit": _attempt(partial(_edit_between, pair, with_second_forward=False)),
        "edit and forward": _attempt(partial(_edit_between, pair, with_second_forward=True)),
    }


def _attempt(case: Callable[[], str]) -> str:
    try:
        return case()
    except AssertionError as error:
        return f"wrong: {error}"


Pair = tuple[str, str]
"""A model and a strategy."""

_PAIRS = [(name, strategy) for name in ("odd", "odd-lora") for strategy in STRATEGIES]
_QUICK = (("odd-lora", "fcdp"),)


def _between_all(mesh: DeviceMesh, pairs: Sequence[Pair]) -> dict[Pair, dict[str, str]]:
    return {pair: _between(mesh, *pair) for pair in pairs}


@pytest.fixture(scope="module")
def between(request: pytest.FixtureRequest) -> list[dict[Pair, dict[str, str]]]:
    items = [i for i in request.session.items if i.path == request.path]
    given = [i.callspec.params for i in items if isinstance(i, pytest.Function)]
    asked = dict.fromkeys((params["name"], params["strategy"]) for params in given)
    return run(_between_all, list(asked), nodes=2, ranks_per_node=2)


@pytest.mark.parametrize(("name", "strategy"), quick(_PAIRS, *_QUICK))
def test_a_backward_uses_what_its_forward_saw(
    between: list[dict[Pair, dict[str, str]]], name: str, strategy: str
) -> None:
    """Two forwards and backwards in both orders, two calls in one loss, and a step in between."""
    for rank in between:
        verdicts = rank[name, strategy]
        assert verdicts["step"] == ("raised" if strategy == "zero3" else "forward")
        assert verdicts["older backward"] == "raised"


@pytest.mark.parametrize(("name", "strategy"), quick(_PAIRS, *_QUICK))
def test_a_silent_write_before_the_backward_is_not_trained_on(
    between: list[dict[Pair, dict[str, str]]], name: str, strategy: str
) -> None:
    for rank in between:
        for case in ("edit", "edit and forward"):
            assert rank[name, strategy][case] in ("forward", "raised"), case
