"""Read numbers from the device: what makes the Python thread wait for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def read(values: Tensor) -> list[Any]:
    """The numbers in a tensor.  The Python thread waits for the device, which no ordinary step does.

    Every read from a device within a step goes through this function.
    """
    found: list[Any] = values.tolist()
    return found
