"""Points in time, on a thread or on a stream of the device, and how long compute waits for transfers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor

from fcdp_compile.devices import Device, StreamDevice
from fcdp_compile.runtime.lanes.tasks import Pending


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


Waits = list[tuple[Mark, Mark]]
"""The beginnings and ends of waits."""


class Exposure:
    """The waits of compiled graphs while anyone measures: of the Python thread, or of its stream on a GPU."""

    def __init__(self, device: Device) -> None:
        self._clock = clock_of(device)
        self._measuring: list[Waits] = []

    def wait(self, pending: Pending) -> Tensor:
        """Wait for a result, as `Pending.wait`, and note how long that takes for all who measure."""
        if not self._measuring:
            return pending.wait()
        before = self._clock()
        result = pending.wait()
        after = self._clock()
        for waits in self._measuring:
            waits.append((before, after))
        return result

    def begin(self) -> Waits:
        """Begin to measure; `end` takes the result."""
        waits: Waits = []
        self._measuring.append(waits)
        return waits

    def end(self, waits: Waits) -> float:
        """Seconds of the waits since `begin` that are over by now; on a GPU, others are not counted."""
        self._measuring = [others for others in self._measuring if others is not waits]
        return sum(after.after_s(before) for before, after in waits if after.is_past())
