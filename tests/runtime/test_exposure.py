"""Waits are measured while measuring is on, on threads and, by events, on streams."""

from __future__ import annotations

import time
from typing import Any

import torch

from fcdp_compile.devices.cpu import Cpu
from fcdp_compile.runtime.exposure import Exposure
from fcdp_compile.runtime.lanes.pending import Pending


class _Slow:
    """A task that ends when it is waited for, after a while."""

    def order(self) -> None:
        time.sleep(0.02)

    def passed(self) -> None:
        pass


def test_waits_count_while_it_is_on() -> None:
    exposure = Exposure(Cpu())
    for is_on, least in ((False, 0.0), (True, 0.04), (False, 0.0)):
        exposure.is_on = is_on
        for _ in range(2):
            value = torch.ones(1)
            assert exposure.wait(Pending(value, done=_Slow())) is value
        found = exposure.take_s()
        assert least <= found, "a sleep is never shorter"
        assert is_on or not found
    assert exposure.take_s() == 0


class _Later:
    """A mark of a stream that has not come so far."""

    def is_past(self) -> bool:
        return False


def test_marks_that_are_not_past_do_not_count() -> None:
    exposure: Any = Exposure(Cpu())
    exposure.is_on, exposure._clock = True, _Later
    exposure.wait(Pending(torch.ones(1)))
    assert exposure.take_s() == 0
