"""The host itself as a device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fcdp_compile.devices.interface import Device, Event, Stream


class Cpu(Device):
    """The host itself.

    Callers check `has_streams` first: a call that needs a stream or an event is a bug of fcdp, and raises.
    """

    has_streams = False
    backends = "gloo"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    # A mistake of a caller that did not check `has_streams`.
    def new_stream(self, *, is_urgent: bool) -> Stream:
        raise NotImplementedError("a CPU has no streams")

    def current_stream(self) -> Stream:
        raise NotImplementedError("a CPU has no streams")

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, *, is_timed: bool = False) -> Event:
        raise NotImplementedError("a CPU has no events")

    def total_bytes(self) -> int | None:
        return None
