"""How full the device is, for a cache that asks before it keeps something there."""

from __future__ import annotations

from collections.abc import Callable

import torch


class DeviceMemory:
    """A device's capacity, the part of it that may be used, and what is used now."""

    def __init__(
        self, *, capacity_bytes: int, threshold: float, used_bytes: Callable[[], int]
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._limit_bytes = int(threshold * capacity_bytes)
        self._used_bytes = used_bytes

    @staticmethod
    def of(
        device: torch.device, *, capacity_bytes: int | None, threshold: float
    ) -> DeviceMemory | None:
        """The memory of a device; None where nothing says how much it has, as on a CPU.

        capacity_bytes: to go by instead of what the device has.
        """
        if device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            return DeviceMemory(
                capacity_bytes=total if capacity_bytes is None else capacity_bytes,
                threshold=threshold,
                used_bytes=lambda: int(torch.cuda.memory_allocated(device)),
            )
        if capacity_bytes is None:
            return None
        # A CPU's allocator counts nothing: what was planned is what is done.
        return DeviceMemory(
            capacity_bytes=capacity_bytes, threshold=threshold, used_bytes=lambda: 0
        )

    def is_short(self) -> bool:
        """Whether more than the threshold is used now."""
        return self._used_bytes() > self._limit_bytes


def peak_bytes(device: torch.device) -> int | None:
    """The most that was ever allocated on a device; None where nobody counts, as on a CPU."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else None
