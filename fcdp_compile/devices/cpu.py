"""The host itself as a device."""

from __future__ import annotations

import torch

from fcdp_compile.devices.interface import Device


class Cpu(Device):
    """The host itself."""

    backends = "gloo"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def total_bytes(self) -> int | None:
        return None
