"""Reports about a live model: its graphs, its memory, its traffic, how long compute waited for transfers."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan import INNER, Direction, Kind, Lane, Plan, Schedule
from fcdp_compile.runtime.collectives.counters import (
    AGREE,
    EXCHANGE,
    LOAD_STATES,
    STORE_STATES,
    Counters,
)
from fcdp_compile.torch_compat.compilers import graph_break_places, graph_breaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of this rank, on the device unless named otherwise.

    predicted_peak_bytes: the highest peak of the plans, alone and as one step, with the tiers that they
    chose; None before the first is compiled.  measured_peak_bytes: the most that this process ever
    allocated, also for other uses (as torch counts it); None on a CPU, where nothing counts it.
    fallbacks: buckets planned for the device that are on the host because the device was too full.
    host_bytes: of host memory: cached node shards, waiting gradients, states of `offload`, and home shards of
    offloaded parameters.
    """

    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    fallbacks: int
    host_bytes: int


def memory(model: nn.Module) -> Memory:
    """The memory of `model`, compiled or not, on this rank.

    Raises: ValueError if the model is not sharded.
    """
    state = state_of(model)
    return Memory(
        predicted_peak_bytes=state.predicted_peak_bytes,
        measured_peak_bytes=state.device.peak_bytes(),
        fallbacks=sum(cache.has_fallen_back for cache in state.buckets.caches()),
        host_bytes=state.pool.slab_bytes + state.host_memory.home_bytes,
    )


class ExposedWait:
    """What `exposed_wait` has measured.

    seconds: how long this rank's compute waited for transfers.  0.0 until the block has ended.
    """

    seconds: float = 0.0


@contextmanager
def exposed_wait(model: nn.Module) -> Iterator[ExposedWait]:
    """Measure how long compute waits for transfers of a model's compiled graphs within a block.

        with fcdp_compile.exposed_wait(model) as wait:
            loss(compiled, batch).backward()
        print(wait.seconds)

    It adds two marks to each wait: on a GPU, events on the stream of compute.  There the end of the block
    waits for the device, so measure some steps, not all.  Reads outside of compiled graphs are not in it.

    model: sharded, compiled or not.

    Raises: ValueError if the model is not sharded.
    """
    state, found = state_of(model), ExposedWait()
    waits = state.exposure.begin()
    try:
        yield found
    finally:
        state.device.synchronize()
        found.seconds = state.exposure.end(waits)


def table(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> str:
    """Return a table as text.  Figures are there without tabulate, so tabulate is imported here."""
    text: str = importlib.import_module("tabulate").tabulate(
        rows, headers=headers, tablefmt="simple"
    )
    return text


_OTHERS = {
    AGREE: (Lane.INTER, "ranks agree on a plan and on stale copies"),
    EXCHANGE: (Lane.INTRA, "brings matrices together for Muon, and back"),
    STORE_STATES: (Lane.D2H, "brings states of optimizers into host memory"),
    LOAD_STATES: (Lane.H2D, "takes states of optimizers out of host memory"),
}
"""Counters of what is no step of a plan."""

_KINDS: dict[str, tuple[str, str, str]] = {
    name: (lane.value, name.removeprefix(f"{lane.value}_"), text)
    for lane in Lane
    for name, (of, text) in ({k.value: (k.lane, k.text) for k in Kind if k.flow} | _OTHERS).items()
    if of is lane
}
"""Link, kind and meaning of every counter, in the order of the table.

Messages by which ranks agree count as inter.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes that this rank sent to others (inter, intra) or copied over its bus (h2d, d2h)."""

    rows: tuple[tuple[str, str, int], ...]

    def bytes(self, link: str, kind: str | None = None) -> int:
        """Bytes over one link, of one kind or of all kinds.

        Raises: ValueError for a link or kind that does not exist.
        """
        known = [row for row in self.rows if row[0] == link and kind in (None, row[1])]
        if not known:
            pairs = ", ".join(f"{a} {b}" for a, b, _ in self.rows)
            raise ArgumentError(f"no traffic of link {link!r} and kind {kind!r}; there is {pairs}")
        return sum(row[2] for row in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The bytes that one rank has moved for a model.

    rank, ranks: the number of this rank, and how many there are.  last_step: bytes moved between the last two
    optimizer steps.  total: bytes moved since `shard`.
    steps: the number of optimizer steps so far.
    """

    rank: int
    ranks: int
    last_step: Moved
    total: Moved
    steps: int

    def __str__(self) -> str:
        one = f"rank {self.rank} of {self.ranks} alone"
        title = f"Sent to others (inter, intra) or copied (d2h, h2d) by {one}"
        counted = zip(_KINDS.values(), self.last_step.rows, self.total.rows, strict=True)
        rows = [
            (link, kind, last, total, meaning)
            for (link, kind, meaning), (_, _, last), (_, _, total) in counted
            if total
        ]
        if not rows:
            return f"{title}: nothing so far"
        headers = ["link", "kind", "last step [B]", "total [B]", "what"]
        return f"{title}:\n\n{table(rows, headers)}"


def traffic(model: nn.Module) -> Traffic:
    """The bytes that this rank has sent or copied for `model`, compiled or not.

    Raises: ValueError if the model is not sharded.
    """
    state = state_of(model)
    counters: Counters = state.counters
    here = state.topology.position
    return Traffic(
        rank=here.rank,
        ranks=here.ranks,
        last_step=_moved(counters.last_step),
        total=_moved(counters.sent),
        steps=counters.steps,
    )


def _moved(sent: dict[str, int]) -> Moved:
    return Moved(rows=tuple((*_KINDS[name][:2], sent.get(name, 0)) for name in _KINDS))


def first_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


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
    broken_at: where Dynamo broke graphs in this process, "FILE:LINE".
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
        names = first_of(self.uncovered)
        return f"in no compiled graph, so gathered without the cache if they are used: {names}"

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
        broken_at=tuple(graph_break_places()),
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
