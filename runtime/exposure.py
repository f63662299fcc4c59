"""How long compute waits for transfers, measured in the steps that a caller chooses."""

from __future__ import annotations

from torch import Tensor

from fcdp_compile.devices import Device
from fcdp_compile.runtime.lanes.marks import Mark, clock_of
from fcdp_compile.runtime.lanes.tasks import Pending

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
