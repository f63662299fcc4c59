"""A lane that is a stream of the device, to which the Python thread issues."""

from __future__ import annotations

from collections.abc import Sequence

from fcdp_compile.devices import Device, Event
from fcdp_compile.runtime.lanes.pending import Done
from fcdp_compile.runtime.lanes.tasks import Begun, Run


class OnStream:
    """The end of a task on a stream."""

    def __init__(self, end: Event, device: Device) -> None:
        self._end = end
        self._device = device

    def order(self) -> None:
        self._device.current_stream().wait_event(self._end)

    def passed(self) -> None:
        pass


class StreamLane:
    """A stream; the Python thread or a lane's thread issues tasks to it."""

    def __init__(self, device: Device, *, is_urgent: bool) -> None:
        self._stream = device.new_stream(is_urgent=is_urgent)
        self._device = device

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        return self.issue(run, after, self._device.record())

    def issue(self, run: Run, after: Sequence[Done], given: Event) -> Done:
        """Issue a task that comes after the event `given`; return the task's end."""
        with self._device.on(self._stream):
            self._stream.wait_event(given)
            for done in after:
                done.order()
            if isinstance(left := run(), Begun):
                left.finish()
            return OnStream(self._device.record(), self._device)

    def close(self) -> None:
        pass

    def join(self) -> None:
        pass
