"""Which tasks of the lanes are done once another task is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from fcdp_compile.plan.kinds import Lane

T = TypeVar("T")

Clock = Mapping[Lane, int]
"""For each lane, how many of its tasks are done when a task is done."""


class LaneClocks(Generic[T]):
    """The clocks of the tasks of the lanes, and what tasks hold until the compute stream comes after them.

    [Note: let go in stream order] Memory belongs to the compute stream: its next kernel may get a buffer that
    is freed.  So the buffers of a task on a lane's stream are held until the compute stream comes after the
    task.  A stream that comes after a task also comes after the earlier tasks of the task's lane, and after
    all tasks that these came after.  So a task has a clock.  When compute waits for a task, the buffers of
    all tasks that its clock counts are let go.

    Nothing asks the device how far it has come: the memory that is held follows from the program alone, also
    if the Python thread is far ahead.  `passes.memory.curve` counts it.
    """

    def __init__(self) -> None:
        self._last: dict[Lane, Clock] = {}
        self._held: dict[Lane, deque[tuple[int, T]]] = {}

    def add(self, lane: Lane, after: Iterable[Clock], held: T) -> Clock:
        """Note the next task of a lane, which waits for the tasks with these clocks; return its clock."""
        clock = dict(self._last.get(lane, {}))
        for earlier in after:
            for other, count in earlier.items():
                clock[other] = max(count, clock.get(other, 0))
        clock[lane] = clock.get(lane, 0) + 1
        self._last[lane] = clock
        self._held.setdefault(lane, deque()).append((clock[lane], held))
        return clock

    def let_go(self, clock: Clock) -> Iterator[T]:
        """What the tasks that `clock` counts still hold; compute now comes after them."""
        for lane, count in clock.items():
            held = self._held[lane]
            while held and held[0][0] <= count:
                yield held.popleft()[1]

    def held(self) -> list[T]:
        """What no `let_go` has returned."""
        return [each for of_lane in self._held.values() for _, each in of_lane]
