"""A device that checks its streams: every access to memory must come after the accesses it depends on.

    check_streams(Cuda)  # before fcdp is used: checks the GPUs of this process

`stream_check` explains the check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fcdp_compile.devices import Device, Event, Stream, StreamDevice, register
from tests.device.clocks import Clock
from tests.device.stream_check import StreamCheck


def check_streams(kind: type[StreamDevice]) -> None:
    """Let fcdp check the streams of all devices of a class."""

    class Checked(kind):  # type: ignore[valid-type,misc]
        @classmethod
        def of(cls, torch_device: torch.device) -> Device:
            return CheckedDevice(kind(torch_device))

    register(Checked)


def _of_device(name: str) -> Callable[..., Any]:
    """Make a method that calls the checked device's own."""

    def call(self: CheckedDevice, *args: Any) -> Any:
        return getattr(self._device, name)(*args)

    return call


class CheckedDevice(StreamDevice):
    """A device with streams whose order is checked."""

    is_checked = True

    def __init__(self, device: StreamDevice) -> None:
        super().__init__(device.torch)
        self._device = device
        self.check = StreamCheck(device.torch, device.current_stream)

    total_bytes, free_bytes = _of_device("total_bytes"), _of_device("free_bytes")
    used_bytes, peak_bytes = _of_device("used_bytes"), _of_device("peak_bytes")
    enter_thread = _of_device("enter_thread")
    runs_on_stream = _of_device("runs_on_stream")
    rng_state, set_rng_state = _of_device("rng_state"), _of_device("set_rng_state")
    name, identity = map(_of_device, ("name", "identity"))

    @property
    def backends(self) -> str:  # type: ignore[override]
        return self._device.backends

    @property
    def registers(self) -> bool:
        return self._device.registers

    # --- streams ------------------------------------------------------------------------------------------

    def new_stream(self, *, is_urgent: bool) -> Stream:
        return _CheckedStream(self.check, self._device.new_stream(is_urgent=is_urgent))

    def current_stream(self) -> Stream:
        return _CheckedStream(self.check, self._device.current_stream())

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._device.on(stream.inner)

    def record(self, *, is_timed: bool = False) -> Event:
        made = self.check.record(lambda: self._device.record(is_timed=is_timed))
        return _CheckedEvent(self.check, *made)

    def synchronize(self) -> None:
        self._device.synchronize()
        self.check.waited_for()

    # --- work ---------------------------------------------------------------------------------------------

    def watching(self, what: str) -> AbstractContextManager[Any]:
        return self.check.watching(what)

    def launch(self, segment: Callable[[list[Any]], Any], args: list[Any], what: str) -> Any:
        given = [a for a in args if isinstance(a, Tensor)]
        self.note(given, [], f"{what} on its arguments")
        del given
        results = segment(args)
        self.note([], [r for r in results if isinstance(r, Tensor)], f"{what} on its results")
        return results

    def note(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> None:
        self.check.note(reads, writes, what)

    @property
    def shares_memory(self) -> bool:
        return self._device.shares_memory

    # --- memory of the host -------------------------------------------------------------------------------

    def pinned_like(self, tensor: Tensor) -> Tensor:
        made = self._device.pinned_like(tensor)
        self.check.pinned(made)
        return made

    def register(self, address: int, size_bytes: int) -> str:
        if not (why := self._device.register(address, size_bytes)):
            self.check.registered(address, size_bytes)
        return why

    def unregister(self, address: int) -> None:
        self._device.unregister(address)
        self.check.unregistered(address)


class _CheckedStream:
    def __init__(self, check: StreamCheck, inner: Any) -> None:
        self._check = check
        self.inner = inner

    def wait_event(self, event: Any) -> None:
        self._check.order(self.inner, event.clock, lambda: self.inner.wait_event(event.inner))


class _CheckedEvent:
    def __init__(self, check: StreamCheck, inner: Any, clock: Clock) -> None:
        self._check = check
        self.inner = inner
        self.clock = clock

    def synchronize(self) -> None:
        self.inner.synchronize()
        self._check.waited_for(self.clock)

    def query(self) -> bool:
        return bool(self.inner.query())

    def elapsed_time(self, end: _CheckedEvent) -> float:
        return float(self.inner.elapsed_time(end.inner))
