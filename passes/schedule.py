"""Move communication away from where it is needed to where it may start."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node

from fcdp_compile import ops
from fcdp_compile.passes.context import META, PassContext, StepMeta
from fcdp_compile.passes.lower import wait_for
from fcdp_compile.passes.transfers import Gather, Reduction, find_gathers, find_reductions

PREFETCHED = 2
"""How many buckets the default budget has room for beyond what compute needs at once."""


def schedule(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Start transfers as early as the in-flight budget allows, and wait as late as possible.

        gather 0, wait 0, compute 0, free 0, gather 1, wait 1, compute 1 ...   (just in time, from `lower`)
        gather 0, gather 1, wait 0, compute 0, free 0, gather 2, wait 1, compute 1 ...

    Compute keeps its order and is cut only where it must wait for a gather or hands gradients over; all
    other steps happen at these cuts.  At each, in this order: what is no longer needed is freed, gathers
    start in order of first use while the budget has room, reductions start, and compute waits for the
    gather it needs next.  So a reduction never stands before a gather that compute needs sooner, stores
    run in the shadow of their bucket's compute, and every gradient is waited for at the end.

    [Note: in-flight budget] Counted are the bytes of node shards and full parameters from the start of
    their gather until the free, and of gradients from the start of their reduction until the wait for the
    step that reads them.  A gather starts early only if it and the largest reduction fit; a reduction that
    does not fit waits for older ones first.  The least that the graph can run in is granted in any case.
    Only sizes of parameters count, which all ranks have in common, so that all decide alike: activations,
    and the time that compute takes, may differ between ranks.

    Requires: `lower`.
    Leaves: the same nodes in another order, and perhaps more waits (for a reduction's first half).
    """
    gathers, reductions = find_gathers(gm.graph, ctx), find_reductions(gm.graph, ctx)
    if not gathers and not reductions:
        return gm
    sweep = _Sweep(gm.graph, gathers, reductions, ctx)
    _reorder(gm.graph, sweep.clusters())
    gm.graph.lint()
    gm.recompile()
    return gm


def in_flight_bytes(gm: GraphModule, ctx: PassContext) -> int:
    """The most bytes that are in flight at once in a lowered graph ([Note: in-flight budget])."""
    at = {node: i for i, node in enumerate(gm.graph.nodes)}
    end = len(at)
    changes: list[tuple[int, int]] = []
    for g in find_gathers(gm.graph, ctx):
        changes += [
            (at[g.starts[0]], g.bytes),
            (max((at[n] for n in g.ends), default=end), -g.bytes),
        ]
    for r in find_reductions(gm.graph, ctx):
        read = [at[u] for u in r.starts[0].users if u.target is ops.wait]
        changes += [
            (at[r.starts[0]], r.bytes),
            (min(read, default=at[r.wait]), -r.packed_bytes),
            (at[r.wait], -r.reduced_bytes),
        ]
    most = alive = 0
    for _, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


@dataclass(slots=True, kw_only=True)
class _Cut:
    """A place between compute nodes where communication happens.

    needs: the gather that compute waits for here.  reduction: whose gradients are complete here.
    collects: whether the first result of a reduction is used here.
    """

    needs: Gather | None = None
    reduction: Reduction | None = None
    collects: bool = False


@dataclass(slots=True)
class _InFlight:
    """limit: bytes for everything.  reserved: what gathers that start early leave of it to reductions."""

    limit: int
    reserved: int
    bytes: int = 0

    def has_room(self, gather: Gather) -> bool:
        return self.bytes + gather.bytes <= self.limit - self.reserved


class _Sweep:
    """Goes through the cuts in order and decides what happens at each."""

    def __init__(
        self, graph: Graph, gathers: list[Gather], reductions: list[Reduction], ctx: PassContext
    ) -> None:
        self._graph = graph
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._cuts = self._find_cuts(gathers, reductions)
        self._number = {node: i for i, node in enumerate(self._cuts)}
        self._in_flight = self._budget(gathers, reductions, ctx)
        self._to_start = deque(gathers)
        self._started: set[Node] = set()
        self._to_free: list[tuple[int, int, Gather]] = []
        self._read: deque[Reduction] = deque()  # gradients that their first half may still read
        self._reduced: deque[Reduction] = deque()  # those on their way to the home shards

    def clusters(self) -> dict[Node, list[Node]]:
        """The communication of each cut, by the node that it takes the place of or stands in front of."""
        return {node: list(self._at(node, cut)) for node, cut in self._cuts.items()}

    # --- where ----------------------------------------------------------------------------------------

    def _find_cuts(self, gathers: list[Gather], reductions: list[Reduction]) -> dict[Node, _Cut]:
        cuts = {g.wait: _Cut(needs=g) for g in gathers}
        cuts |= {r.starts[0]: _Cut(reduction=r) for r in reductions}
        first = next(
            n for n in self._graph.nodes if n.op != "placeholder" and n.target is not ops.check
        )
        output = self._graph.output_node()
        results = [u for r in reductions for u in r.wait.users]
        collect = min(results, key=self._order.__getitem__, default=output)
        for node in (first, output, collect):
            cuts.setdefault(node, _Cut())
        cuts[collect].collects = True
        return dict(sorted(cuts.items(), key=lambda item: self._order[item[0]]))

    def _budget(
        self, gathers: list[Gather], reductions: list[Reduction], ctx: PassContext
    ) -> _InFlight:
        """The user's limit, or what the graph needs at least and `PREFETCHED` more buckets."""
        reserved = max((r.bytes for r in reductions), default=0)
        least = self._just_in_time(gathers) + reserved
        if ctx.in_flight_bytes is not None:
            return _InFlight(limit=max(least, ctx.in_flight_bytes), reserved=reserved)
        largest = sorted((g.bytes for g in gathers), reverse=True)
        return _InFlight(limit=least + reserved + sum(largest[:PREFETCHED]), reserved=reserved)

    def _just_in_time(self, gathers: list[Gather]) -> int:
        """The most bytes of gathers alive at once if each starts where compute waits for it."""
        alive = most = 0
        ends: list[tuple[int, int]] = []
        for gather in gathers:
            while ends and ends[0][0] < self._order[gather.wait]:
                alive -= heapq.heappop(ends)[1]
            heapq.heappush(ends, (self._last_use(gather), gather.bytes))
            alive += gather.bytes
            most = max(most, alive)
        return most

    def _last_use(self, gather: Gather) -> int:
        """Where its free stands; never, where the graph returns one of its parameters."""
        frees = [self._order[n] for n in gather.ends if n.target is ops.free]
        return frees[0] if frees else len(self._order)

    # --- what -----------------------------------------------------------------------------------------

    def _at(self, node: Node, cut: _Cut) -> Iterator[Node]:
        yield from self._free(before=self._order[node])
        if cut.needs is not None:
            while cut.needs.wait not in self._started:
                yield from self._start(self._to_start.popleft(), node)
        while self._to_start and self._in_flight.has_room(self._to_start[0]):
            yield from self._start(self._to_start.popleft(), node)
        if cut.reduction is not None:
            yield from self._reduce(cut.reduction)
        if cut.needs is not None:
            yield cut.needs.wait
        if cut.collects:
            yield from (r.wait for r in self._reduced)
            self._reduced.clear()
        if node.op == "output":
            yield from self._free(before=len(self._order) + 1)

    def _start(self, gather: Gather, node: Node) -> Iterator[Node]:
        early = self._number[gather.wait] - self._number[node]
        yield from gather.pack
        for start in gather.starts:
            yield _labelled(start, f"{early} cuts early" if early else "just in time")
        self._started.add(gather.wait)
        self._in_flight.bytes += gather.bytes
        order = self._order[gather.wait]
        heapq.heappush(self._to_free, (self._last_use(gather), order, gather))

    def _free(self, *, before: int) -> Iterator[Node]:
        while self._to_free and self._to_free[0][0] < before:
            gather = heapq.heappop(self._to_free)[2]
            self._in_flight.bytes -= gather.bytes
            yield from gather.ends

    def _reduce(self, reduction: Reduction) -> Iterator[Node]:
        flight = self._in_flight
        while self._read and flight.bytes + reduction.bytes > flight.limit:
            older = self._read.popleft()
            flight.bytes -= older.packed_bytes
            yield wait_for(self._graph, older.starts[0])
        while self._reduced and flight.bytes + reduction.bytes > flight.limit:
            older = self._reduced.popleft()
            flight.bytes -= older.reduced_bytes if len(older.starts) > 1 else older.bytes
            yield older.wait
        yield from reduction.starts
        flight.bytes += reduction.bytes
        if len(reduction.starts) > 1:
            self._read.append(reduction)
        self._reduced.append(reduction)


def _labelled(node: Node, label: str) -> Node:
    meta = node.meta[META]
    node.meta[META] = StepMeta(step=replace(meta.step, label=label))
    return node


def _reorder(graph: Graph, clusters: dict[Node, list[Node]]) -> None:
    """Put each cluster in the place of its node, and every node where the first cluster names it."""
    moved = {node for cluster in clusters.values() for node in cluster}
    order: dict[Node, None] = {}
    for node in list(graph.nodes):
        order |= dict.fromkeys(clusters.get(node, ()))
        if node not in moved:
            order[node] = None
    output = graph.output_node()
    for node in order:
        if node is not output:
            output.prepend(node)
