"""Explain how a model was compiled: its strategies, its graphs and their bytes, parameters in no graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fcdp_compile.plan import INNER, Direction, Lane, Plan, Schedule
from fcdp_compile.report.memory import Memory, memory
from fcdp_compile.report.table import table
from fcdp_compile.sharding import sharded_class
from fcdp_compile.sharding.shard import state_of
from fcdp_compile.torch_compat import graph_break_places, graph_breaks

_OWN = sharded_class.__file__  # its forwards call the model's, and so break where these do
_LINKS = (Lane.INTER, Lane.INTRA, Lane.H2D, Lane.D2H)
_SHOWN = 5
_PLACES_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One schedule of a compiled graph: the bytes that a rank is planned to send or copy in it, by link.

    name: such as "forward cold".  bytes: bytes by lane (inter, intra, h2d, d2h).  inner_bytes: that the model
    itself sends within the node.
    """

    graph: int
    name: str
    buckets: int
    steps: int
    bytes: dict[str, int]
    inner_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The result of `explain`.

    strategies: each with the number of its parameters.  passes: of all graphs compiled so far, also those for
    other shapes or modes.  uncovered: names of parameters that are in no compiled graph.
    graph_breaks: the reasons that Dynamo gave in this process, for any model, with their counts.
    broken_at: where Dynamo lately broke graphs, "FILE:LINE"; a break in an inlined function also shows in its
    caller.
    """

    strategies: tuple[tuple[str, int], ...]
    passes: tuple[Pass, ...]
    uncovered: tuple[str, ...]
    graph_breaks: tuple[tuple[str, int], ...]
    broken_at: tuple[str, ...]
    memory: Memory

    def __str__(self) -> str:
        parts = ", ".join(f"{name} ({count} parameters)" for name, count in self.strategies)
        text = [f"strategy: {parts}", self._table(), self._uncovered(), self._breaks()]
        if (peak := self.memory.predicted_peak_bytes) is not None:
            text.append(
                f"predicted peak of device memory: {peak / 2**20:.1f} MiB; in host memory: "
                f"{self.memory.host_bytes / 2**20:.1f} MiB"
            )
        return "\n\n".join(text)

    def _table(self) -> str:
        if not self.passes:
            return "nothing is compiled yet; run a step of the compiled model first"
        has_inner = any(p.inner_bytes for p in self.passes)
        links = [*(lane.value for lane in _LINKS), *[INNER] * has_inner]
        headers = ["graph", "pass", "buckets", "steps", *(f"{link} [B]" for link in links)]
        rows = [
            [
                *(p.graph, p.name, p.buckets, p.steps, *(p.bytes[lane.value] for lane in _LINKS)),
                *[p.inner_bytes] * has_inner,
            ]
            for p in self.passes
        ]
        return table(rows, headers)

    def _uncovered(self) -> str:
        if not self.uncovered:
            return "every parameter is in a compiled graph"
        shown = ", ".join(self.uncovered[:_SHOWN])
        more = f" and {len(self.uncovered) - _SHOWN} more" if len(self.uncovered) > _SHOWN else ""
        return (
            f"in no compiled graph, so gathered without the cache if they are used: {shown}{more}"
        )

    def _breaks(self) -> str:
        if not self.graph_breaks:
            return "no graph breaks"
        lines = (f"  {count} x {reason}" for reason, count in self.graph_breaks)
        places = "".join(f"\n  at {place}" for place in self.broken_at[:_PLACES_SHOWN])
        if (more := len(self.broken_at) - _PLACES_SHOWN) > 0:
            places += f"\n  and at {more} more places"
        return "graph breaks (TORCH_LOGS=graph_breaks shows all):\n" + "\n".join(lines) + places


def explain(model: nn.Module) -> Explanation:
    """Report what was compiled of `model`, compiled or not, so far, and the bytes that the graphs move.

    Raises: ValueError if the model is not sharded.
    """
    state = state_of(model)
    specs = [record.spec for record in state.records.values()]
    plans = [state.plans[number] for number in sorted(state.plans)]
    covered = {p.name for plan in plans for bucket in plan.buckets for p in bucket.params}
    return Explanation(
        strategies=tuple(
            (str(strategy), sum(s.strategy == strategy for s in specs))
            for strategy in state.strategies
        ),
        passes=tuple(_pass(plan, schedule) for plan in plans for schedule in plan.schedules),
        uncovered=tuple(s.name for s in specs if s.name not in covered),
        graph_breaks=tuple(graph_breaks().items()),
        broken_at=tuple(p for p in graph_break_places() if not p.startswith(f"{_OWN}:")),
        memory=memory(model),
    )


def _pass(plan: Plan, schedule: Schedule) -> Pass:
    is_inference = schedule.direction is Direction.INFERENCE
    sent = {lane.value: sum(s.bytes for s in schedule.steps if s.lane is lane) for lane in _LINKS}
    return Pass(
        graph=plan.graph,
        name=f"{'evaluation' if is_inference else schedule.direction.value} {schedule.variant.value}",
        buckets=len({s.bucket for s in schedule.steps if s.bucket is not None}),
        steps=len(schedule.steps),
        bytes=sent,
        inner_bytes=sum(s.inner_bytes for s in schedule.steps),
    )
