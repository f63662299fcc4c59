"""The device that the distributed tests run on: the CPU, or the simulated one with FCDP_TEST_DEVICE=sim."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager


def is_simulated() -> bool:
    """Whether tests run on the simulated device."""
    return os.environ.get("FCDP_TEST_DEVICE") == "sim"


def prepare_test_device() -> None:
    """Compile the device, so that no rank must wait for it."""
    if is_simulated():
        from tests.device.build import extension

        extension()


def issued() -> list[str]:
    """The collectives that this process has issued on the simulated device."""
    if not is_simulated():
        return []
    from tests.device.build import extension

    return list(extension().issued())


def issued_in_other_orders(logs: Sequence[Sequence[str]]) -> str:
    """What two ranks issued in different orders on the simulated device, or nothing."""
    if not any(logs):
        return ""
    from tests.device import sim

    return sim.issued_in_other_orders(logs)


def on_test_device() -> AbstractContextManager[None]:
    """Within the block, tensors are on the device of the tests unless code names another one."""
    if not is_simulated():
        return contextlib.nullcontext()
    from tests.device import sim

    return sim.as_default()
