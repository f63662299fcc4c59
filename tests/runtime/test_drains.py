"""A backward program returns before its reductions have ended; whoever reads a gradient waits for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from builders_graph import Where, lower_toy
from fcdp_compile.params.late import Awaited, LateTensor
from fcdp_compile.plan import Direction, Kind
from fcdp_compile.runtime.drains import Drains
from tests.runtime.fake_model import fake_model, program, same_on_all_ranks

X, T = torch.tensor(3.0), torch.tensor(2.0)


def late(*values: float) -> tuple[LateTensor, list[str]]:
    """A late tensor, and a list that says when its values were waited for."""
    asked: list[str] = []

    def finish() -> None:
        asked.append("finished")
        awaited.value = torch.tensor(values)

    awaited = Awaited(finish)
    return LateTensor(torch.empty(len(values)), awaited), asked


def test_the_first_op_waits_for_the_values_and_detaching_does_not() -> None:
    tensor, asked = late(1.0, 2.0)
    alias = tensor.detach()
    assert alias.shape == (2,)
    assert not asked
    assert torch.equal(alias + 1, torch.tensor([2.0, 3.0]))
    assert torch.equal(tensor, torch.tensor([1.0, 2.0]))
    assert asked == ["finished"]


def test_writes_reach_every_alias() -> None:
    tensor, _ = late(1.0)
    alias = tensor.detach()
    alias.add_(1.0)
    assert tensor.present() is alias.present()
    assert tensor.sum().item() == 2.0


def backward(
    model: Any, drains: Drains, strategy: str = "fcdp"
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run the toy's backward; the input's gradient, the gradients, and what these should be."""
    made = lower_toy(
        {"w": (8, 4), "b": (4,)}, Where(), strategy=strategy, scheduled=True, segmented=True
    )
    _, homes = same_on_all_ranks()
    _, *saved = program(made, Direction.FORWARD).run(model, [*homes, X])
    running = program(made, Direction.BACKWARD)
    dx, *grads = running.run(model, [*saved, T], drained=partial(drains.begin, trained=[]))
    return dx, grads, [2 * T * X * home for home in homes]


def within_a_backward(call: Any) -> None:
    """Call a function while autograd runs a backward."""
    leaf = torch.zeros((), requires_grad=True)
    seen: list[bool] = []
    doubled = leaf * 2
    doubled.register_hook(lambda grad: seen.append(call() is None))
    doubled.backward()
    assert seen == [True]


@pytest.mark.parametrize("strategy", ["zero3", "mics", "fcdp"])
def test_gradients_are_late_until_the_backward_ends(strategy: str) -> None:
    model, drains, found = fake_model(strategy), Drains(), []

    def run() -> None:
        dx, grads, expected = backward(model, drains, strategy)
        assert type(dx) is Tensor
        assert all(type(g) is LateTensor for g in grads)
        found.extend(zip(grads, expected, strict=True))

    within_a_backward(run)
    for grad, expected in found:
        assert grad._awaited.value is not None, "the end of the backward is the end of the drain"
        assert torch.equal(grad, expected)


def test_the_next_drain_runs_the_last_one() -> None:
    model, drains = fake_model(), Drains()

    def run() -> None:
        first, second = (backward(model, drains)[1] for _ in range(2))
        assert all(g._awaited.value is not None for g in first)  # type: ignore[attr-defined]
        assert all(g._awaited.value is None for g in second)  # type: ignore[attr-defined]

    within_a_backward(run)


def test_a_failed_reduction_is_an_error_wherever_a_gradient_is_read() -> None:
    model, drains = fake_model(), Drains()
    failed: list[bool] = []
    model.seams.fail = partial(failed.append, True)
    model.collectives.fails.add(Kind.INTER_REDUCE_SCATTER)

    def run() -> None:
        _, grads, _ = backward(model, drains)
        for grad in (*grads, *grads):
            with pytest.raises(RuntimeError, match="failed"):
                grad + 1

    with pytest.raises(RuntimeError, match="failed"):
        within_a_backward(run)
    assert failed == [True]
