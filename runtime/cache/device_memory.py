"""How full the device is; a cache asks before it keeps a copy there."""

from __future__ import annotations

from collections.abc import Callable

from fcdp_compile.devices import Device

_SERVES = 16
"""How many questions one look answers: a look takes tens of microseconds, a step of 80 layers asks 320 times,
and the memory above the threshold has room for more than 16 buckets."""


class DeviceMemory:
    """A device's capacity, the part of it that may be used, and what is used now.

    serves: how many questions one look answers while there is room.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        threshold: float,
        used_bytes: Callable[[], int],
        serves: int = _SERVES,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._serves = serves
        self._limit_bytes = int(threshold * capacity_bytes)
        self._used_bytes = used_bytes
        self._left = 0

    @staticmethod
    def of(device: Device, *, capacity_bytes: int | None, threshold: float) -> DeviceMemory | None:
        """The memory of a device; None if its size is not known, as on a CPU.

        capacity_bytes: counts instead of the device's own size.
        """
        capacity_bytes = device.total_bytes() if capacity_bytes is None else capacity_bytes
        if capacity_bytes is None:
            return None
        return DeviceMemory(
            capacity_bytes=capacity_bytes, threshold=threshold, used_bytes=device.used_bytes
        )

    def is_short(self) -> bool:
        """Whether more than the threshold is used."""
        if not self._left:
            if self._used_bytes() > self._limit_bytes:
                return True  # the next question looks again: moving copies away makes room
            self._left = self._serves
        self._left -= 1
        return False
