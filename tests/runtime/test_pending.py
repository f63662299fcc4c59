"""Started steps: waited for once, and holding nothing after."""

from __future__ import annotations

import weakref

import pytest
import torch

from fcdp_compile.runtime.pending import Pending


class Task:
    """A task that ends when somebody wants to come after it."""

    def __init__(self, out: torch.Tensor, error: Exception | None = None) -> None:
        self._out = out
        self._error = error
        self.orders = 0

    def order(self) -> None:
        self.orders += 1
        if self._error is not None:
            raise self._error
        self._out.fill_(5)


def test_a_result_without_a_task() -> None:
    result = torch.ones(2)
    assert Pending(result).wait() is result


def test_the_result_is_handed_over_after_the_task() -> None:
    out = torch.zeros(2)
    task = Task(out)
    pending = Pending(out, done=task)
    assert task.orders == 0
    assert pending.tensor is out  # lanes may have it before
    assert pending.wait() is out
    assert out.tolist() == [5, 5]
    assert task.orders == 1


def test_waiting_twice_is_a_mistake() -> None:
    pending = Pending(torch.ones(2))
    pending.wait()
    with pytest.raises(AssertionError, match="waited for twice"):
        pending.wait()


def test_the_error_of_the_task_is_raised() -> None:
    out = torch.zeros(2)
    pending = Pending(out, done=Task(out, RuntimeError("a peer is gone")))
    with pytest.raises(RuntimeError, match="a peer is gone"):
        pending.wait()


def test_what_the_task_reads_is_held_until_then() -> None:
    sent, out = torch.ones(2), torch.zeros(2)
    pending = Pending(out, done=Task(out), held=[out, sent])
    alive = weakref.ref(sent)
    del sent
    assert alive() is not None
    pending.wait()
    assert alive() is None
    assert pending.tensor is out
