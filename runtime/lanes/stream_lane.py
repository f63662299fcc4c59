"""A lane that is a stream of the device, to which the Python thread issues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fcdp_compile.devices import Event, StreamDevice
from fcdp_compile.runtime.lanes.tasks import Begun, Done, Run


class OnStream:
    """The end of a task on a stream."""

    def __init__(self, end: Event, device: StreamDevice) -> None:
        self._end = end
        self._device = device

    def order(self) -> None:
        self._device.current_stream().wait_event(self._end)

    def passed(self) -> None:
        pass


class StreamLane:
    """A stream; the Python thread or a lane's thread issues tasks to it."""

    def __init__(self, device: StreamDevice, *, is_urgent: bool) -> None:
        self._stream = device.new_stream(is_urgent=is_urgent)
        self._device = device

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        return self.prepared(run, after)()

    def prepared(self, run: Run, after: Sequence[Done]) -> Callable[[], Done]:
        """Return a call that issues a task after all that this thread's stream has been given by now."""
        return partial(self._issue, run, after, self._device.record())

    def _issue(self, run: Run, after: Sequence[Done], given: Event) -> Done:
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
