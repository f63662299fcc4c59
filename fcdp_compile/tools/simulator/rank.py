"""One simulated rank: a program that gives steps to lanes, and lanes that run their steps in order.

Compute and waits hold the program up; every other step starts when the program has reached it, its lane is
free and its inputs are ready.

[Note: known times]
A rank computes each time as soon as everything that it depends on is known, whatever the clock says.  It runs
ahead until it needs an end that depends on other nodes, or on other flows over its links.  That end is known
when the clock reaches it, or before, and everything that depends on it happens later.  So the clock is never
late.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fcdp_compile.plan import Lane
from fcdp_compile.tools.simulator.tasks import Task

Begin = Callable[["SimulatedRank", int, float], None]
"""Takes over a task whose end a rank cannot compute alone: the rank, the task's position, its start in s."""

_UNKNOWN = math.inf
"""The end of a task that has not ended yet."""


@dataclass(slots=True)
class _LaneQueue:
    """The tasks of a lane that have not started, each with the time when the program queued it."""

    waiting: deque[tuple[int, float]] = field(default_factory=deque)
    free_s: float = 0.0
    is_taken: bool = False


class SimulatedRank:
    """One rank that represents all ranks of a class ([Note: folding] in `conditions`).

    number: the number of the class.  tasks: the tasks of the whole training step.  longer_s: the seconds by
    which the work of each task takes longer than `Task.work_s`.  Times count from the beginning of the
    training step, by position of the task: came_s, when the program reached it; start_s, end_s; busy_s, how
    long it kept its lane busy, without waiting for other nodes.
    """

    def __init__(
        self,
        number: int,
        tasks: Sequence[Task],
        *,
        longer_s: Sequence[float],
        begin: Begin,
    ) -> None:
        self.number = number
        self.now_s = 0.0
        self.came_s: list[float] = []
        self.start_s = [0.0] * len(tasks)
        self.end_s = [_UNKNOWN] * len(tasks)
        self.busy_s = [0.0] * len(tasks)
        self._tasks = tasks
        self._longer_s = longer_s
        self._begin = begin
        self._lanes = {lane: _LaneQueue() for lane in Lane}
        self._waiting_for: dict[int, list[Lane]] = {}
        self._awake = [Lane.COMPUTE]

    @property
    def is_done(self) -> bool:
        """Whether all tasks have ended."""
        return len(self.came_s) == len(self._tasks) and _UNKNOWN not in self.end_s

    def resume(self) -> None:
        """Continue as far as times are known."""
        while self._awake:
            lane = self._awake.pop()
            if lane is Lane.COMPUTE:
                self._run_program()
            else:
                self._run_lane(lane)

    def finish(self, position: int, end_s: float, busy_s: float) -> None:
        """End a task that `begin` has taken over.

        end_s: as if work after its bytes took no longer here.  busy_s: as if none of its work did.
        """
        task, longer_s = self._tasks[position], self._longer_s[position]
        before_s = longer_s / 2 if task.is_compute else 0.0  # end_s has this half already
        lane = self._lanes[task.lane]
        lane.is_taken, lane.free_s = False, end_s + (longer_s - before_s)
        if task.lane is Lane.COMPUTE:
            self.now_s = lane.free_s
        self._end(position, lane.free_s, busy_s + longer_s)
        self._awake.append(task.lane)

    def _run_program(self) -> None:
        tasks, program = self._tasks, self._lanes[Lane.COMPUTE]
        while not program.is_taken and (position := len(self.came_s)) < len(tasks):
            task = tasks[position]
            if task.lane is not Lane.COMPUTE:
                self.came_s.append(self.now_s)
                queue = self._lanes[task.lane]
                queue.waiting.append((position, self.now_s))
                if len(queue.waiting) == 1:
                    self._run_lane(task.lane)
                continue
            ready_s = self._ready_s(position, Lane.COMPUTE)
            if ready_s == _UNKNOWN:
                return
            self.came_s.append(self.now_s)
            self.start_s[position] = self.now_s
            begin_s = max(self.now_s, ready_s)
            if task.demand is not None:
                program.is_taken = True
                self._begin(self, position, begin_s + self._longer_s[position] / 2)
                return
            taken_s = task.alone_s + self._longer_s[position]
            self.now_s = begin_s + taken_s
            self._end(position, self.now_s, taken_s)

    def _run_lane(self, lane: Lane) -> None:
        queue = self._lanes[lane]
        while queue.waiting and not queue.is_taken:
            position, given_s = queue.waiting[0]
            ready_s = self._ready_s(position, lane)
            if ready_s == _UNKNOWN:
                return
            queue.waiting.popleft()
            start_s = max(given_s, ready_s, queue.free_s)
            self.start_s[position] = start_s
            task = self._tasks[position]
            if task.is_joint or task.demand is not None:
                queue.is_taken = True
                self._begin(self, position, start_s)
                return
            taken_s = task.alone_s + self._longer_s[position]
            queue.free_s = start_s + taken_s
            self._end(position, queue.free_s, taken_s)

    def _ready_s(self, position: int, lane: Lane) -> float:
        """Return when a task's inputs are ready; if that is unknown, its lane is woken later."""
        ready_s = 0.0
        for other in self._tasks[position].waits:
            ready_s = max(ready_s, self.end_s[other])
            if ready_s == _UNKNOWN:
                self._waiting_for.setdefault(other, []).append(lane)
                break
        return ready_s

    def _end(self, position: int, end_s: float, busy_s: float) -> None:
        self.end_s[position] = end_s
        self.busy_s[position] = busy_s
        self._awake += self._waiting_for.pop(position, ())
