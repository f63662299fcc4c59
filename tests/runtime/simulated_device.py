"""A device's streams, events and allocator without a card, as asynchronous as a device can be.

A launched kernel is queued on the current stream and runs when `advance` picks that stream; a queued wait
stops its stream until the event is recorded.  Memory belongs to the compute stream: the next kernel there
overwrites freed memory, as if the allocator had given the memory to that kernel.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator

import torch

from fcdp_compile.devices import StreamDevice


class Event:
    """Recorded on a stream, once."""

    def __init__(self, device: SimulatedDevice, *, is_timed: bool) -> None:
        self._device = device
        self._has_time = is_timed
        self._time = 0
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def synchronize(self) -> None:
        self._device.synchronize_all()

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            assert event.is_past, "torch would raise"
            assert event._has_time, "torch would raise"
        return float(end._time - self._time)

    def occur(self) -> None:
        self._time = self._device.time
        self.is_past = True


class Stream:
    """A queue of kernels and of events to wait for."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.queue: deque[Callable[[], None] | Event] = deque()

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)


class Memory:
    """The memory at a buffer's address: kernels hold it, and that does not prevent its reuse."""

    def __init__(self) -> None:
        self.value = math.nan


class Buffer:
    """A tensor of one number, on the device."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.memory = Memory()
        weakref.finalize(self, device.free, self.memory)


class SimulatedDevice(StreamDevice):
    """One device, with a stream for compute.

    is_blocking: whether collectives block their caller, as Gloo's do.
    """

    backends = "fake"

    def __init__(self, seed: int, *, is_blocking: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self._is_blocking = is_blocking
        self._random = random.Random(seed)
        self._current = threading.local()
        self.used = 0
        self.time = 0  # kernels that ran, so that every one takes a millisecond
        self.streams: list[Stream] = []
        self.compute = self._new_stream()

    def new_stream(self, *, is_urgent: bool) -> Stream:
        return self._new_stream()

    def current_stream(self) -> Stream:
        found: Stream = getattr(self._current, "stream", self.compute)
        return found

    def record(self, *, is_timed: bool = False) -> Event:
        event = Event(self, is_timed=is_timed)
        self.launch(event.occur)
        return event

    def total_bytes(self) -> None:
        return None

    def used_bytes(self) -> int:
        return self.used

    @property
    def registers(self) -> bool:
        return True

    def runs_on_stream(self, group: object) -> bool:
        return not self._is_blocking

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue a kernel on this thread's stream."""
        self.current_stream().queue.append(kernel)

    def free(self, memory: Memory) -> None:
        """Free memory: the next kernel of the compute stream overwrites it."""
        self.compute.queue.append(lambda: setattr(memory, "value", math.nan))

    def advance(self, kernels: int) -> None:
        """Run up to `kernels` kernels of any streams that can go on."""
        for _ in range(kernels):
            ready = [s for s in self.streams if self._is_ready(s)]
            if not ready:
                return
            self._random.choice(ready).queue.popleft()()  # type: ignore[operator]
            self.time += 1

    def synchronize_all(self) -> None:
        """Run all queued kernels."""
        self.advance(1 << 30)
        assert not any(s.queue for s in self.streams), "streams wait for each other"

    def _new_stream(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    @staticmethod
    def _is_ready(stream: Stream) -> bool:
        while stream.queue and isinstance(event := stream.queue[0], Event):
            if not event.is_past:
                return False
            stream.queue.popleft()
        return bool(stream.queue)
