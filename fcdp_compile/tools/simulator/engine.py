"""The events of a training step: flows join and leave shared links, and change each other's speed.

Classes of nodes interact only in joint tasks, and lanes of a rank only on shared links; each rank computes
all other times alone (`rank` [Note: known times]).

[Note: joint flows]
A collective of all nodes moves in step, at the least speed that the links of any node allow.  The bandwidth
that it then leaves unused on other nodes' links is not given to their own flows.

[Note: one moment]
All events of one time are handled before any speed changes, so neither the order of events nor the number of
classes that nodes are folded into changes a single bit of a result.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from fcdp_compile.tools.simulator.rank import SimulatedRank
from fcdp_compile.tools.simulator.sharing import Demand, Sharing
from fcdp_compile.tools.simulator.tasks import Task


@dataclass(slots=True, eq=False)
class _Flow:
    """A running task whose speed depends on other nodes or flows.

    end_s: when it ends at its present speed, including the work after its bytes.  offered: the
    speed that the links of each rank allow, by the rank's number; speeds: how many ranks allow each speed.
    version: of its latest event; older events are ignored, because an event cannot be removed.
    """

    position: int
    task: Task
    ranks: Sequence[SimulatedRank]
    end_s: float
    late_s: float = 0.0
    speed: float = 1.0
    is_moving: bool = False
    version: int = 0
    offered: dict[int, float] = field(default_factory=dict)
    speeds: Counter[float] = field(default_factory=Counter)

    def offer(self, number: int, speed: float) -> bool:
        """Note the speed that the links of a rank allow; return whether it is new."""
        before = self.offered.get(number)
        if before == speed:
            return False
        if before is not None:
            self.speeds[before] -= 1
            if not self.speeds[before]:
                del self.speeds[before]
        self.offered[number] = speed
        self.speeds[speed] += 1
        return True

    def change_speed(self, now_s: float) -> bool:
        """Move at the least speed that any rank allows; return whether the end needs another event."""
        speed = min(self.speeds)
        if speed == self.speed and self.version:
            return False
        if speed != self.speed:
            left_s = max(0.0, self.moved_s - now_s)
            end_s = now_s + left_s * self.speed / speed + self.task.after_s
            self.late_s += end_s - self.end_s
            self.end_s, self.speed = end_s, speed
        self.version += 1
        return True

    @property
    def moved_s(self) -> float:
        """When all bytes have moved, at the present speed."""
        return self.end_s - self.task.after_s


class Engine:
    """Simulates one rank for each class of nodes until all tasks have ended.

    longer_s: for each class, the seconds by which the work of each task takes longer.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        sharing: Sharing,
        *,
        longer_s: Sequence[Sequence[float]],
    ) -> None:
        self._tasks = tasks
        self._sharing = sharing
        self._ranks = [
            SimulatedRank(number, tasks, longer_s=seconds, begin=self._begin)
            for number, seconds in enumerate(longer_s)
        ]
        self._came: dict[int, list[float]] = {}
        self._events: list[tuple[float, int, int, _Flow]] = []
        self._numbers = count()
        self._over: deque[_Flow] = deque()
        self._moving: list[list[_Flow]] = [[] for _ in self._ranks]
        self._changed: dict[int, None] = {}

    def run(self) -> list[SimulatedRank]:
        """Run, once; return the ranks with all times."""
        for rank in self._ranks:
            rank.resume()
        self._finish_flows()
        while self._events:
            now_s = self._events[0][0]
            while self._events and self._events[0][0] <= now_s:  # [Note: one moment]
                _, _, version, flow = heapq.heappop(self._events)
                if version == flow.version:
                    self._happen(flow)
            self._share(now_s)
        assert all(rank.is_done for rank in self._ranks), "a step waits for what never ends"
        return self._ranks

    def _begin(self, rank: SimulatedRank, position: int, start_s: float) -> None:
        task = self._tasks[position]
        ranks: Sequence[SimulatedRank] = (rank,)
        if task.is_joint:
            came = self._came.setdefault(position, [])
            came.append(start_s)
            if len(came) < len(self._ranks):
                return
            start_s, ranks = max(self._came.pop(position)), self._ranks
        flow = _Flow(position=position, task=task, ranks=ranks, end_s=start_s + task.alone_s)
        if task.demand is None:
            self._over.append(flow)
        else:
            self._put(start_s + task.latency_s, flow)

    def _put(self, at_s: float, flow: _Flow) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), flow.version, flow))

    def _finish_flows(self) -> None:
        """End flows; others may then begin, and some of these end at once."""
        while self._over:
            flow = self._over.popleft()
            for rank in flow.ranks:
                rank.finish(flow.position, flow.end_s, flow.task.alone_s + flow.late_s)
                rank.resume()

    def _happen(self, flow: _Flow) -> None:
        """Handle the event of a flow: its bytes begin to move, or have all moved."""
        for rank in flow.ranks:
            if flow.is_moving:
                self._moving[rank.number].remove(flow)
            else:
                self._moving[rank.number].append(flow)
            self._changed[rank.number] = None
        if flow.is_moving:
            self._over.append(flow)
            self._finish_flows()
        flow.is_moving = True

    def _share(self, now_s: float) -> None:
        """Set new speeds for the flows of each rank where a flow has come or gone."""
        news: dict[_Flow, None] = {}
        for number in self._changed:
            flows = sorted(self._moving[number], key=lambda flow: flow.position)
            for flow, speed in zip(flows, self._speeds(flows), strict=True):
                if flow.offer(number, speed):
                    news[flow] = None
        self._changed.clear()
        for flow in news:
            if flow.change_speed(now_s):
                self._put(max(now_s, flow.moved_s), flow)

    def _speeds(self, flows: Sequence[_Flow]) -> tuple[float, ...]:
        demands: list[Demand] = [f.task.demand for f in flows if f.task.demand is not None]
        return self._sharing.speeds(tuple(demands))
