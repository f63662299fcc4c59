"""Which buffers the lanes' streams may still read or write.

[Note: let go in stream order] Memory belongs to the compute stream: what is freed is given to the next of its
kernels.  So what a lane's stream reads or writes is held until the compute stream comes after the task.  A
stream that comes after a task also comes after all that was given to the task's lane before it, and after
all that these tasks came after.  A task therefore has a clock: how many tasks of each lane are done when the
task is.  When compute waits for the task, everything that its clock counts is let go.

Nothing asks the device how far it has come: how much memory is held follows from the program alone, also
where the Python thread is far ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from fcdp_compile.plan import Lane
from fcdp_compile.runtime.lanes.pending import Done

Clock = Mapping[Lane, int]
"""How many tasks of each lane a task, and whoever waits for it, comes after."""


class StreamOrder:
    """The tasks of the lanes of one device, and what they hold."""

    def __init__(self) -> None:
        self._clocks: dict[Lane, dict[Lane, int]] = {}  # of each lane's last task
        self._held: dict[Lane, deque[tuple[int, list[object]]]] = {}

    def add(self, lane: Lane, after: Sequence[Done], held: list[object]) -> Clock:
        """Hold what a task needs that is about to be given to a lane; returns the task's clock."""
        clock = dict(self._clocks.get(lane, {}))
        for done in after:
            if isinstance(done, Ordered):
                for other, count in done.clock.items():
                    clock[other] = max(count, clock.get(other, 0))
        clock[lane] = clock.get(lane, 0) + 1
        self._clocks[lane] = clock
        self._held.setdefault(lane, deque()).append((clock[lane], held))
        return clock

    def let_go(self, clock: Clock) -> None:
        """Let go of what the tasks hold that compute now comes after."""
        for lane, count in clock.items():
            held = self._held[lane]
            while held and held[0][0] <= count:
                held.popleft()[1].clear()


class Ordered:
    """The end of a task whose buffers are let go in stream order."""

    __slots__ = ("_done", "_order", "clock")

    def __init__(self, done: Done, clock: Clock, order: StreamOrder) -> None:
        self._done = done
        self._order = order
        self.clock = clock

    def order(self) -> None:
        self._done.order()

    def passed(self) -> None:
        self._order.let_go(self.clock)
