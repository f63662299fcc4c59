"""Started steps: waited for once, and holding nothing after."""

from __future__ import annotations

import weakref

import pytest
import torch

from fcdp_compile.runtime.pending import Pending


class Work:
    """A collective that finishes when it is waited for."""

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        self._out.fill_(5)


def test_a_result_without_work() -> None:
    result = torch.ones(2)
    assert Pending(result).wait() is result


def test_work_is_done_before_the_result_is_finished() -> None:
    out = torch.zeros(2)
    work = Work(out)
    pending = Pending(out, work=work, finish=lambda t: t + 1)
    assert work.waits == 0
    assert pending.wait().tolist() == [6, 6]
    assert work.waits == 1


def test_waiting_twice_is_a_mistake() -> None:
    pending = Pending(torch.ones(2))
    pending.wait()
    with pytest.raises(AssertionError, match="waited for twice"):
        pending.wait()


def test_the_sent_buffer_is_held_until_then() -> None:
    sent, out = torch.ones(2), torch.zeros(2)
    pending = Pending(out, work=Work(out), held=sent)
    alive = weakref.ref(sent)
    del sent
    assert alive() is not None
    pending.wait()
    assert alive() is None
    alive = weakref.ref(out)
    del out
    assert alive() is None
