"""The events of a training step: flows join and leave links that are shared, and change each other's speed.

Classes of nodes meet in joint tasks only, and lanes of a rank on shared links only; the rest each rank works
out alone (`rank` [Note: known times]).

[Note: joint flows]
A collective of all nodes moves in step, so it has the least speed that the links of any node leave it.  What
it then does not use of the others' is not given to their own flows.

[Note: one moment]
What happens at the same time is taken together before anything changes speed: so neither the order of events
nor the number of classes that nodes are folded into changes a single bit of a result.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from fcdp_compile.simulator.rank import SimulatedRank
from fcdp_compile.simulator.sharing import Demand, Sharing
from fcdp_compile.simulator.tasks import Task


@dataclass(slots=True, eq=False)
class _Flow:
    """A task under way that other nodes or flows have a say in.

    end_s: when it ends at its present speed, the copy that puts parts in order included.  offered: the
    speeds that the links of each rank leave it, by the rank's number; speeds: how many leave it that.
    version: that of its last event, as an event cannot be taken back.
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
        """Note what the links of a rank leave; returns whether that is news."""
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
        """Move as fast as all let it; returns whether the end of its bytes needs another event."""
        speed = min(self.speeds)
        if speed == self.speed and self.version:
            return False
        if speed != self.speed:
            left_s = max(0.0, self.moved_s - now_s)
            end_s = now_s + left_s * self.speed / speed + self.task.copy_s
            self.late_s += end_s - self.end_s
            self.end_s, self.speed = end_s, speed
        self.version += 1
        return True

    @property
    def moved_s(self) -> float:
        """When its bytes have moved, at its present speed."""
        return self.end_s - self.task.copy_s


class Engine:
    """Runs ranks that each stand for a class of nodes until all tasks have ended.

    compute_s: of each class, what each task takes of the program.  slowdowns: of each class, of copies.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        sharing: Sharing,
        *,
        slowdowns: Sequence[float],
        compute_s: Sequence[Sequence[float]],
    ) -> None:
        self._tasks = tasks
        self._sharing = sharing
        self._ranks = [
            SimulatedRank(number, tasks, slowdown=slow, compute_s=computes, begin=self._begin)
            for number, (slow, computes) in enumerate(zip(slowdowns, compute_s, strict=True))
        ]
        self._came: dict[int, list[float]] = {}
        self._events: list[tuple[float, int, int, _Flow]] = []
        self._numbers = count()
        self._over: deque[_Flow] = deque()
        self._moving: list[list[_Flow]] = [[] for _ in self._ranks]
        self._changed: dict[int, None] = {}

    def run(self) -> list[SimulatedRank]:
        """Run, once; returns the ranks with all times."""
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
        """End flows, which may let others begin that end at once."""
        while self._over:
            flow = self._over.popleft()
            for rank in flow.ranks:
                rank.finish(flow.position, flow.end_s, flow.task.alone_s + flow.late_s)
                rank.resume()

    def _happen(self, flow: _Flow) -> None:
        """Let a flow's bytes begin to move, or have moved."""
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
        """Give the flows on links where one has come or gone their new speeds."""
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
