"""A slow and plain simulation of all ranks one by one, event by event.

Shares no code with the simulator.  Each rank has its own flow on each link: on its own link within the node,
on its switch's link to host memory, and on its node's card.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fcdp_compile.cluster.profile import ClusterProfile
from fcdp_compile.plan import Kind, Lane, Step

LATENCY, BYTES, WORK, OVER = range(4)
_TINY_S = 1e-15
_TINY_BYTES = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node.  slowdown: of compute.  inter: the card's bytes/s."""

    slowdown: float
    inter: float


@dataclass(slots=True, eq=False)
class Flow:
    """One rank's part in a transfer, or its compute."""

    step: Step
    rank: int
    links: dict[str, float]
    left_bytes: float
    left_s: float
    work_s: float
    joint: int = 0
    phase: int = LATENCY
    rate: float = 0.0


@dataclass(slots=True)
class Rank:
    """A rank.  at: the next step of its program."""

    at: int = 0
    queues: dict[Lane, list[Step]] = field(default_factory=lambda: {lane: [] for lane in Lane})
    running: dict[Lane, int] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)


class EveryRank:
    """The ends of all steps on all ranks of some nodes."""

    def __init__(
        self, steps: Sequence[Step], profile: ClusterProfile, nodes: Sequence[Node], g: int
    ) -> None:
        self.steps, self.profile, self.nodes, self.g = steps, profile, nodes, g
        self.ranks = [Rank() for _ in range(len(nodes) * g)]
        self.flows: list[Flow] = []
        self.now = 0.0

    def run(self) -> list[dict[int, float]]:
        while True:
            while any(self._program(i) for i in range(len(self.ranks))) or self._lanes():
                pass
            if not self.flows:
                assert all(r.at == len(self.steps) for r in self.ranks)
                return [r.ends for r in self.ranks]
            self._share()
            self._wait()

    def _program(self, i: int) -> bool:
        """Let a rank's program do one thing now, if it can; returns whether it did."""
        rank = self.ranks[i]
        if rank.at == len(self.steps) or Lane.COMPUTE in rank.running:
            return False
        step = self.steps[rank.at]
        if step.lane is not Lane.COMPUTE:
            rank.queues[step.lane].append(step)
            rank.at += 1
            return True
        if not all(w in rank.ends for w in step.waits):
            return False
        rank.queues[Lane.COMPUTE].append(step)
        self._begin(step, [i])
        rank.at += 1
        return True

    def _lanes(self) -> bool:
        """Begin the transfers that all their ranks have reached."""
        begun = False
        for lane in (Lane.INTER, Lane.INTRA, Lane.H2D, Lane.D2H):
            everyone = list(range(len(self.ranks)))
            within = [everyone[i : i + self.g] for i in range(0, len(everyone), self.g)]
            for group in [everyone] if lane is Lane.INTER else within:
                steps = [self._head(i, lane) for i in group]
                if all(s is not None and s is steps[0] for s in steps):
                    self._begin(steps[0], group)
                    begun = True
        return begun

    def _head(self, i: int, lane: Lane) -> Step | None:
        rank = self.ranks[i]
        if lane in rank.running or not rank.queues[lane]:
            return None
        step = rank.queues[lane][0]
        return step if all(w in rank.ends for w in step.waits) else None

    def _begin(self, step: Step, group: list[int]) -> None:
        machine = self.profile.machine
        for i in group:
            rank, node = self.ranks[i], self.nodes[i // self.g]
            rank.queues[step.lane].pop(0)
            rank.running[step.lane] = step.index
            links, moving = self._links(step, i), step.bytes + step.inner_bytes
            work_s = step.kernel_bytes / machine.memory_bytes_per_s
            work_s += max(
                step.flops / machine.flops_per_s, step.accessed_bytes / machine.memory_bytes_per_s
            )
            work_s *= node.slowdown
            before_s = work_s / 2 if step.kind is Kind.COMPUTE else 0.0
            flow = Flow(
                step=step,
                rank=i,
                links=links,
                left_bytes=moving,
                left_s=(machine.inter.latency_s if moving else 0.0) + before_s,
                work_s=work_s - before_s,
                joint=step.index if step.lane is Lane.INTER else -1,
            )
            self.flows.append(flow)

    def _links(self, step: Step, i: int) -> dict[str, float]:
        """The bytes over each link, for each byte that the rank sends."""
        node, place = divmod(i, self.g)
        switch = f"{node}.{place // self.profile.ranks_per_host_link}"
        up, down = {f"d2h {switch}": 1.0}, {f"h2d {switch}": 1.0}
        within = {f"intra {i}": 1.0}
        if self.profile.intra_over_host_link:
            within |= up | down
        cards = {f"card {node}": 1.0}
        links = {Lane.INTER: cards, Lane.H2D: down, Lane.D2H: up}
        return links.get(step.lane, within)

    def _capacity(self, link: str) -> float:
        kind = link.partition(" ")[0]
        machine = self.profile.machine
        if kind == "card":  # no collective is faster than the slowest card
            return min(node.inter for node in self.nodes)
        return {"intra": machine.intra, "h2d": machine.h2d, "d2h": machine.d2h}[kind].bytes_per_s

    def _share(self) -> None:
        moving = [f for f in self.flows if f.phase == BYTES]
        rising, left = list(moving), {n: self._capacity(n) for f in moving for n in f.links}
        for flow in moving:
            flow.rate = 0.0
        while rising:
            totals = {n: sum(f.links.get(n, 0.0) for f in rising) for n in left}
            full = {n: left[n] / total for n, total in totals.items() if total}
            level = min(full.values())
            stay = [f for f in rising if any(full[n] <= level * (1 + 1e-9) for n in f.links)]
            for flow in stay:
                flow.rate = level
                for name, weight in flow.links.items():
                    left[name] = max(0.0, left[name] - weight * level)
            rising = [f for f in rising if f not in stay]
        for flow in moving:  # a collective of all nodes moves in step
            if flow.joint >= 0:
                flow.rate = min(f.rate for f in moving if f.joint == flow.joint)

    def _wait(self) -> None:
        """Advance the clock to the next event."""
        times = [f.left_bytes / f.rate if f.phase == BYTES else f.left_s for f in self.flows]
        passed = max(0.0, min(times))
        assert math.isfinite(passed)
        self.now += passed
        for flow in self.flows:
            if flow.phase == BYTES:
                flow.left_bytes -= flow.rate * passed
            else:
                flow.left_s -= passed
            while flow.phase != OVER and self._is_through(flow):
                self._next_phase(flow)
        self.flows = [f for f in self.flows if f.phase != OVER]

    def _is_through(self, flow: Flow) -> bool:
        if flow.phase == BYTES:
            return flow.left_bytes <= _TINY_BYTES
        return flow.left_s <= _TINY_S

    def _next_phase(self, flow: Flow) -> None:
        flow.phase += 1
        if flow.phase == WORK:
            flow.left_s = flow.work_s
        if flow.phase == OVER:
            rank = self.ranks[flow.rank]
            rank.ends[flow.step.index] = self.now
            del rank.running[flow.step.lane]
