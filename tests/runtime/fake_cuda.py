"""CUDA's streams, events and allocator without a GPU, as asynchronous as they may be.

What is launched is queued on the current stream and runs when `advance` picks that stream; a queued wait
holds its stream up until the event was recorded.  Memory belongs to the compute stream: whatever is freed
is overwritten by what comes next there, as if the allocator had handed it to the next kernel.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch


class Event:
    """Recorded on a stream, once."""

    def __init__(self, cuda: FakeCuda, *, enable_timing: bool = False) -> None:
        self._cuda = cuda
        self._has_time = enable_timing
        self._time = 0
        self.is_past = False

    def record(self, stream: Stream | None = None) -> None:
        with self._cuda.on(stream or self._cuda.current):
            self._cuda.launch(self._pass)

    def query(self) -> bool:
        return self.is_past

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            assert event.is_past, "torch would raise"
            assert event._has_time, "torch would raise"
        return float(end._time - self._time)

    def _pass(self) -> None:
        self._time = self._cuda.time
        self.is_past = True


class Stream:
    """A queue of kernels and of events to wait for."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.device = torch.device("cuda", 0)
        self.queue: deque[Callable[[], None] | Event] = deque()

    def wait_event(self, event: Event) -> None:
        self.queue.append(event)

    def record_event(self) -> Event:
        with self._cuda.on(self):
            event = Event(self._cuda)
            event.record()
        return event


class Memory:
    """What a buffer's address stands for: kernels have this, and nothing keeps it from being reused."""

    def __init__(self) -> None:
        self.value = math.nan


class Buffer:
    """A tensor of one number, on the device."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.memory = Memory()
        weakref.finalize(self, cuda.free, self.memory)


class FakeCuda:
    """One device, with a stream for compute."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._current = threading.local()
        self.time = 0  # kernels that ran, so that every one takes a millisecond
        self.streams: list[Stream] = []
        self.compute = self._new_stream()

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put this in the place of what lanes use of torch.cuda."""
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self._new_stream())
        monkeypatch.setattr(torch.cuda, "Event", partial(Event, self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)

    @property
    def current(self) -> Stream:
        return getattr(self._current, "stream", self.compute)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def launch(self, kernel: Callable[[], None]) -> None:
        """Queue a kernel on this thread's stream."""
        self.current.queue.append(kernel)

    def free(self, memory: Memory) -> None:
        """Take memory back: the next kernel of the compute stream gets it."""
        self.compute.queue.append(lambda: setattr(memory, "value", math.nan))

    def advance(self, kernels: int) -> None:
        """Run up to so many kernels, of any streams that can go on."""
        for _ in range(kernels):
            ready = [s for s in self.streams if self._is_ready(s)]
            if not ready:
                return
            self._random.choice(ready).queue.popleft()()  # type: ignore[operator]
            self.time += 1

    def synchronize(self) -> None:
        """Run everything."""
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
