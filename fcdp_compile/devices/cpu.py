"""The host itself as a device."""

from __future__ import annotations

import torch

from fcdp_compile.devices.interface import Device


class Cpu(Device):
    """The host itself."""

    kind = "cpu"
    backends = "gloo"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @classmethod
    def of(cls, torch_device: torch.device) -> Device:
        return cls()

    @classmethod
    def is_available(cls) -> bool:
        return True

    def total_bytes(self) -> int | None:
        return None
