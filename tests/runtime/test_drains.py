"""A backward program returns before its reductions have ended; whoever reads a gradient waits for them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from builders_graph import Where, lower_toy
from fcdp_compile.core.params.late import Awaited, LateTensor
from fcdp_compile.devices import Cpu
from fcdp_compile.plan import Direction, Kind
from fcdp_compile.runtime.drains import Drains
from fcdp_compile.torch_compat.tensors import MemoryLayout
from tests.runtime.fake_model import fake_model, program, same_on_all_ranks

X, T = torch.tensor(3.0), torch.tensor(2.0)


def late(*values: float) -> tuple[LateTensor, list[str]]:
    """A late tensor, and a list that says when its values were waited for."""
    asked: list[str] = []

    def finish() -> None:
        if awaited.value is None:
            asked.append("finished")
            awaited.value = torch.tensor(values)

    awaited = Awaited(finish)
    return LateTensor(MemoryLayout.of(torch.empty(len(values))), awaited), asked


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
    model: Any, drains: Drains, strategy: str = "fcdp", fails: Iterable[Kind] = ()
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Run the toy's backward twice; the input's gradient, the gradients, and what these should be.

    fails: kinds that fail in the second run.
    """
    made = lower_toy(
        {"w": (8, 4), "b": (4,)}, Where(), strategy=strategy, scheduled=True, segmented=True
    )
    _, homes = same_on_all_ranks()
    forward, running = (program(made, d) for d in (Direction.FORWARD, Direction.BACKWARD))
    for is_first in (True, False):
        _, *saved = forward.run(model, [*homes, X])
        dx, *grads = running.run(model, [*saved, T], drained=partial(drains.begin, trained=[]))
        if is_first:
            assert all(type(g) is Tensor for g in grads), "nobody knows their memory layout yet"
            model.collectives.fails |= set(fails)
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
    model, drains, found = fake_model(strategy), Drains(Cpu()), []

    def run() -> None:
        dx, grads, expected = backward(model, drains, strategy)
        assert type(dx) is Tensor
        assert all(type(g) is LateTensor for g in grads)
        found.extend(zip(grads, expected, strict=True))

    within_a_backward(run)
    for grad, expected in found:
        assert grad._awaited.value is not None, "the end of the backward is the end of the drain"
        assert MemoryLayout.of(grad) == MemoryLayout.of(grad.present())
        assert torch.equal(grad, expected)


def test_the_next_drain_runs_the_last_one() -> None:
    model, drains = fake_model(), Drains(Cpu())

    def run() -> None:
        first, second = (backward(model, drains)[1] for _ in range(2))
        assert all(g._awaited.value is not None for g in first)  # type: ignore[attr-defined]
        assert all(g._awaited.value is None for g in second)  # type: ignore[attr-defined]

    within_a_backward(run)


def test_a_failed_reduction_is_an_error_wherever_a_gradient_is_read() -> None:
    model, drains = fake_model(), Drains(Cpu())
    failed: list[bool] = []
    read: list[Tensor] = []
    model.seams.fail = partial(failed.append, True)

    def run() -> None:
        _, grads, _ = backward(model, drains, fails={Kind.INTER_REDUCE_SCATTER})
        assert not failed, "nobody has read a gradient"
        for grad in (*grads, *grads):
            with pytest.raises(RuntimeError, match="failed"):
                grad + 1
            read.append(grad)

    with pytest.raises(RuntimeError, match="failed"):
        within_a_backward(run)
    assert failed == [True]
    assert read


def test_a_failed_backward_leaves_nothing() -> None:
    """Neither the drain nor its results, once nobody holds the gradients; without the garbage collector."""
    model, drains = fake_model(), Drains(Cpu())
    alive: list[weakref.ref[Any]] = []

    def run() -> None:
        _, grads, _ = backward(model, drains)
        alive.extend(weakref.ref(g._awaited) for g in grads)  # type: ignore[attr-defined]
        raise KeyError

    gc.disable()
    try:
        with pytest.raises(KeyError):
            within_a_backward(run)
        assert [a() for a in alive] == [None] * len(alive)
        assert not drains._under_way
    finally:
        gc.enable()


def test_other_threads_may_read_gradients() -> None:
    model, drains = fake_model(), Drains(Cpu())

    def run() -> None:
        _, grads, expected = backward(model, drains)
        found: list[bool] = []
        reads = [
            Thread(target=lambda g=g, e=e: found.append(torch.equal(g, e)))  # type: ignore[misc]
            for g, e in zip(grads * 4, expected * 4, strict=True)
        ]
        for thread in reads:
            thread.start()
        for thread in reads:
            thread.join()
        assert found == [True] * len(reads)

    within_a_backward(run)
