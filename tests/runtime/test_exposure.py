"""Waits are measured while somebody measures."""

from __future__ import annotations

import time
from typing import Any

import torch

from fcdp_compile.devices.interface import Cpu
from fcdp_compile.runtime.lanes.marks import Exposure, clock_of
from fcdp_compile.runtime.lanes.tasks import Pending


class _Slow:
    """A task that ends when it is waited for, after a while."""

    def order(self) -> None:
        time.sleep(0.02)

    def passed(self) -> None:
        pass


def test_waits_count_for_all_who_measure() -> None:
    exposure = Exposure(Cpu())

    def wait() -> None:
        value = torch.ones(1)
        assert exposure.wait(Pending(value, done=_Slow())) is value

    wait()
    outer = exposure.begin()
    wait()
    inner = exposure.begin()
    wait()
    found = exposure.end(inner)
    wait()
    assert found >= 0.02, "a sleep is never shorter"
    assert len(outer) == 3
    assert exposure.end(outer) >= 0.06
    wait()
    assert len(outer) == 3


class _Later:
    """A mark of a stream that has not come so far."""

    def is_past(self) -> bool:
        return False


def test_marks_that_are_not_past_do_not_count() -> None:
    exposure: Any = Exposure(Cpu())
    exposure._clock = _Later
    waits = exposure.begin()
    exposure.wait(Pending(torch.ones(1)))
    assert len(waits) == 1
    assert exposure.end(waits) == 0


def test_moments_of_threads_are_apart_by_seconds() -> None:
    clock = clock_of(Cpu())
    first, second = clock(), clock()
    assert first.is_past()
    assert 0.0 <= second.after_s(first) < 60.0
