"""Points in time, on a thread or on a stream of the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from fcdp_compile.devices import Device, StreamDevice


class Mark(Protocol):
    """A point in the time of the thread that made it, or of the stream that the thread issues to."""

    def is_past(self) -> bool:
        """Whether that time has come."""

    def after_s(self, origin: Any) -> float:
        """Seconds since an earlier mark of the same clock; both must be past."""


Clock = Callable[[], Mark]
"""Makes a mark for now, on the calling thread or its current stream."""


class _Moment:
    """A point in the time of a thread; all threads have one clock."""

    __slots__ = ("_at_s",)

    def __init__(self) -> None:
        self._at_s = perf_counter()

    def is_past(self) -> bool:
        return True

    def after_s(self, origin: _Moment) -> float:
        return self._at_s - origin._at_s


class _OnStream:
    """A point in the time of a stream; all streams of a device have one clock."""

    __slots__ = ("_event",)

    def __init__(self, device: StreamDevice) -> None:
        self._event = device.record(is_timed=True)

    def is_past(self) -> bool:
        return bool(self._event.query())

    def after_s(self, origin: _OnStream) -> float:
        return float(origin._event.elapsed_time(self._event)) / 1e3


def clock_of(device: Device) -> Clock:
    """The clock of the device's streams, or of threads."""
    return partial(_OnStream, device) if isinstance(device, StreamDevice) else _Moment
