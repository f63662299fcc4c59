"""How long compute waits for transfers, measured in the steps that a caller chooses."""

from __future__ import annotations

from torch import Tensor

from fcdp_compile.devices import Device
from fcdp_compile.runtime.lanes.marks import Mark, clock_of
from fcdp_compile.runtime.lanes.pending import Pending


class Exposure:
    """The waits of compiled graphs while `is_on`: those of the Python thread, or of its stream on a GPU."""

    def __init__(self, device: Device) -> None:
        self.is_on = False
        self._clock = clock_of(device)
        self._waits: list[tuple[Mark, Mark]] = []

    def wait(self, pending: Pending) -> Tensor:
        """Wait for a result, as `Pending.wait`, and note how long that takes if measuring is on."""
        if not self.is_on:
            return pending.wait()
        before = self._clock()
        result = pending.wait()
        self._waits.append((before, self._clock()))
        return result

    def take_s(self) -> float:
        """Seconds of the waits since the last call that are over by now; on a GPU, others are not counted."""
        waits, self._waits = self._waits, []
        return sum(after.after_s(before) for before, after in waits if after.is_past())
