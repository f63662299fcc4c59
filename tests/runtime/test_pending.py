"""Started steps: they are waited for once, and hold nothing afterwards."""

from __future__ import annotations

import pytest
import torch

from fcdp_compile.runtime.lanes.tasks import Pending, passed_on


class Task:
    """A task that ends when a wait for it begins."""

    def __init__(self, out: torch.Tensor, error: Exception | None = None) -> None:
        self._out = out
        self._error = error
        self.orders = 0
        self.has_passed = False

    def order(self) -> None:
        self.orders += 1
        if self._error is not None:
            raise self._error
        self._out.fill_(5)

    def passed(self) -> None:
        assert self.orders, "let go before it was ordered"
        self.has_passed = True


def test_a_result_without_a_task() -> None:
    result = torch.ones(2)
    assert Pending(result).wait() is result


def test_the_result_is_handed_over_after_the_task() -> None:
    out = torch.zeros(2)
    task = Task(out)
    pending = Pending(out, done=task)
    assert (task.orders, task.has_passed) == (0, False)
    assert pending.tensor is out  # lanes may have it before
    assert pending.wait() is out
    assert out.tolist() == [5, 5]
    assert (task.orders, task.has_passed) == (1, True)


def test_waiting_twice_is_a_mistake() -> None:
    pending = Pending(torch.ones(2))
    pending.wait()
    with pytest.raises(AssertionError, match="waited for twice"):
        pending.wait()


def test_what_is_passed_on_can_be_waited_for_beside_its_source() -> None:
    out = torch.zeros(2)
    task = Task(out)
    pending = Pending(out, done=task, is_full=True)
    after = passed_on(pending)
    assert pending.wait() is after.wait() is out
    assert task.orders == 2
    assert after.is_full


def test_the_error_of_the_task_is_raised() -> None:
    out = torch.zeros(2)
    pending = Pending(out, done=Task(out, RuntimeError("a peer is gone")))
    with pytest.raises(RuntimeError, match="a peer is gone"):
        pending.wait()
