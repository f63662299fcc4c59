"""Hold the buffers that the lanes' streams may still read or write.

[Note: let go in stream order] Memory belongs to the compute stream: its next kernel may get a buffer that is
freed.  So the buffers of a task on a lane's stream are held until the compute stream comes after the task.  A
stream that comes after a task also comes after the earlier tasks of the task's lane, and after all tasks that
these came after.  So a task has a clock: for each lane, the number of tasks that are done when this task is
done.  When compute waits for a task, the buffers of all tasks that its clock counts are let go.

Nothing asks the device how far it has come: the memory that is held follows from the program alone, also if
the Python thread is far ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from fcdp_compile.plan import Lane
from fcdp_compile.runtime.lanes.tasks import Done

Clock = Mapping[Lane, int]
"""For each lane, how many of its tasks are done when a task is done."""


class StreamOrder:
    """The tasks of the lanes of one device, and the buffers that they hold."""

    def __init__(self) -> None:
        self._clocks: dict[Lane, dict[Lane, int]] = {}  # of each lane's last task
        self._held: dict[Lane, deque[tuple[int, list[object]]]] = {}

    def add(self, lane: Lane, after: Sequence[Done], held: list[object]) -> Clock:
        """Hold the buffers of a task that is about to start on a lane; return the task's clock."""
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
        """Let go of the buffers of all tasks that `clock` counts; compute now comes after them."""
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
