"""Start communication earlier than its result is needed, and wait for it later."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node

from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META, PassContext
from fcdp_compile.passes.graph.explicit import wait_for
from fcdp_compile.passes.graph.transfers import Gather, Reduction, find_gathers, find_reductions

# Larger values gain nothing on simulated lanes, and cost memory (tests/passes/test_lane_time.py).
PREFETCHED = 1
"""How many buckets the default budget may gather in full before compute needs them."""

FETCHED = 2
"""How many further node shards it may gather early: they are small, and their links are slow."""

OUTSTANDING = 1
"""How many reductions may still be on their way when another one starts."""


def schedule(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Start transfers as early as the in-flight budget allows, and wait as late as possible.

        gather 0, wait 0, compute 0, free 0, gather 1, wait 1, compute 1 ...   (just in time, from `lower`)
        gather 0, gather 1, wait 0, compute 0, free 0, gather 2, wait 1, compute 1 ...

    Compute keeps its order.  It is cut only where it must wait for a gather or hands gradients over; all
    other steps happen at these cuts.  At each cut, in this order: buffers that are no longer needed are
    freed; gathers start in order of first use while the budget has room (node shards, which are small,
    further ahead than full parameters); reductions start; compute waits for the gather that it needs next.
    So a reduction never delays a gather that compute needs sooner, a store runs while compute uses its
    bucket, and compute waits for gradients at the end.

    [Note: in-flight budget] The budget counts node shards and full parameters from the start of the step
    that makes them until the free, and gradients from the start of their reduction until the wait for the
    step that reads them.  It always grants the gathers that are needed at once if none starts early, and the
    largest reduction.  Early gathers and older reductions share the rest; a reduction that does not fit
    waits for older reductions first.  Only sizes of parameters count.  All ranks have the same sizes and
    decide alike; activations and the time of compute may differ between ranks.

    Requires: `lower`.
    Leaves: the same nodes in another order, and perhaps more waits (for a reduction's first half).
    """
    gathers, reductions = find_gathers(gm.graph), find_reductions(gm.graph)
    if not gathers and not reductions:
        return gm
    sweep = _Sweep(gm.graph, gathers, reductions, ctx)
    _reorder(gm.graph, sweep.clusters())
    gm.recompile()
    return gm


def in_flight_bytes(gm: GraphModule) -> int:
    """The most bytes that are in flight at once in a lowered graph ([Note: in-flight budget])."""
    at = {node: i for i, node in enumerate(gm.graph.nodes)}
    end = len(at)
    changes: list[tuple[int, int]] = []
    for g in find_gathers(gm.graph):
        gone = max((at[n] for n in g.ends), default=end)
        changes += [(at[g.starts[0]], g.fetched_bytes), (at[g.spread[0]], g.full_bytes)]
        changes.append((gone, -g.bytes))
    for r in find_reductions(gm.graph):
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

    needs: the gather that compute waits for here.  reductions: those whose gradients are complete here.
    collects: whether the first result of a reduction is used here.
    """

    needs: Gather | None = None
    reductions: tuple[Reduction, ...] = ()
    collects: bool = False


@dataclass(slots=True, kw_only=True)
class _Budget:
    """The shares of the budget, and how much of each is taken; all in bytes.

    fetched, full: the shares of the two stages of gathers that start early; gathers that compute already
    waits for do not count.  reductions: the share of gradients on their way.
    """

    fetched: int
    full: int
    reductions: int
    fetched_taken: int = 0
    full_taken: int = 0
    reductions_taken: int = 0

    def may_fetch(self, gather: Gather) -> bool:
        return self.fetched_taken + gather.fetched_bytes <= self.fetched

    def may_spread(self, gather: Gather) -> bool:
        return self.full_taken + gather.full_bytes <= self.full

    def has_room_for(self, reduction: Reduction) -> bool:
        return self.reductions_taken + reduction.bytes <= self.reductions


class _Sweep:
    """Goes through the cuts in order and decides which communication starts or ends at each.

    At a cut, in this order: free what nothing reads any more; start what compute waits for here; start later
    gathers while the budget has room; start the reductions of gradients that are complete here; wait.
    """

    def __init__(
        self, graph: Graph, gathers: list[Gather], reductions: list[Reduction], ctx: PassContext
    ) -> None:
        self._graph = graph
        self._order = {node: i for i, node in enumerate(graph.nodes)}
        self._cuts = self._find_cuts(gathers, reductions)
        self._number = {node: i for i, node in enumerate(self._cuts)}
        self._budget = self._shares(gathers, reductions, ctx)
        self._to_fetch = deque(gathers)
        self._to_spread = deque(gathers)
        self._to_free: list[tuple[int, int, Gather]] = []
        self._read: deque[Reduction] = deque()  # their first half may still read gradients
        self._reduced: deque[Reduction] = deque()  # on their way to the home shards

    def clusters(self) -> dict[Node, list[Node]]:
        """The communication nodes of each cut, by the node that they replace or precede."""
        return {node: list(self._at(node, cut)) for node, cut in self._cuts.items()}

    # --- where ----------------------------------------------------------------------------------------

    def _find_cuts(self, gathers: list[Gather], reductions: list[Reduction]) -> dict[Node, _Cut]:
        cuts = {g.wait: _Cut(needs=g) for g in gathers}
        cuts |= {r.starts[0]: _Cut(reductions=(r,)) for r in reductions}
        first = next(
            n for n in self._graph.nodes if n.op != "placeholder" and n.target is not ops.check
        )
        output = self._graph.output_node()
        results = [u for r in reductions for u in r.wait.users]
        collect = min(results, key=self._order.__getitem__, default=output)
        for node in (first, output, collect):
            cuts.setdefault(node, _Cut())
        cuts[collect].collects = True
        ordered = dict(sorted(cuts.items(), key=lambda item: self._order[item[0]]))
        return self._merge(ordered, {n for g in gathers for n in g.pack})

    def _merge(self, cuts: dict[Node, _Cut], packing: set[Node]) -> dict[Node, _Cut]:
        """Move reductions to the next cut where compute waits, if there is no compute between the cuts.

        There they start after the gathers, which compute needs sooner.
        """
        merged: dict[Node, _Cut] = {}
        waiting: list[Node] = []  # cuts since the last compute that only reduce
        for node in self._graph.nodes:
            cut = cuts.get(node)
            if cut is None:
                if node.target not in ops.EXPLICIT and node not in packing:
                    waiting = []
                continue
            if cut.needs is not None:
                older = [r for n in waiting for r in merged.pop(n).reductions]
                cut.reductions = (*older, *cut.reductions)
            merged[node] = cut
            only_reduces = cut.reductions and cut.needs is None and not cut.collects
            waiting = [*waiting, node] if only_reduces else []
        return merged

    def _shares(
        self, gathers: list[Gather], reductions: list[Reduction], ctx: PassContext
    ) -> _Budget:
        fetched = max((g.fetched_bytes for g in gathers), default=0)
        full = max((g.full_bytes for g in gathers), default=0)
        reduced = max((r.bytes for r in reductions), default=0)
        wanted = _Budget(
            fetched=(PREFETCHED + FETCHED) * fetched,
            full=PREFETCHED * full,
            reductions=(1 + OUTSTANDING) * reduced,
        )
        if ctx.in_flight_bytes is None:
            return wanted
        spare = max(0, ctx.in_flight_bytes - self._just_in_time(gathers) - reduced)
        extra = wanted.fetched + wanted.full + OUTSTANDING * reduced
        return _Budget(
            fetched=spare * wanted.fetched // max(1, extra),
            full=spare * wanted.full // max(1, extra),
            reductions=reduced + spare * OUTSTANDING * reduced // max(1, extra),
        )

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
        """The position of the free; the graph's end if the graph returns a parameter of the bucket."""
        frees = [self._order[n] for n in gather.ends if n.target is ops.free]
        return frees[0] if frees else len(self._order)

    # --- what -----------------------------------------------------------------------------------------

    def _at(self, node: Node, cut: _Cut) -> Iterator[Node]:
        yield from self._free(before=self._order[node])
        if cut.needs is not None:
            yield from self._need(cut.needs, node)
        while self._may_spread_next():
            if _first(self._to_fetch) is _first(self._to_spread):
                yield from self._fetch_next(node)
            yield from self._spread_next(node)
        while self._to_fetch and self._budget.may_fetch(self._to_fetch[0]):
            yield from self._fetch_next(node)
        for reduction in cut.reductions:
            yield from self._reduce(reduction)
        if cut.needs is not None:
            yield cut.needs.wait
        if cut.collects:
            yield from (r.wait for r in self._reduced)
            self._reduced.clear()
        if node.op == "output":
            yield from self._free(before=len(self._order) + 1)

    def _need(self, gather: Gather, node: Node) -> Iterator[Node]:
        """Start the rest of a gather that compute waits for here; from now on it does not count as early."""
        if _first(self._to_fetch) is gather:
            yield from self._fetch_next(node)
        if _first(self._to_spread) is gather:
            yield from self._spread_next(node)
        self._budget.fetched_taken -= gather.fetched_bytes
        self._budget.full_taken -= gather.full_bytes

    def _may_spread_next(self) -> bool:
        gather = _first(self._to_spread)
        if gather is None or not self._budget.may_spread(gather):
            return False
        return _first(self._to_fetch) is not gather or self._budget.may_fetch(gather)

    def _fetch_next(self, node: Node) -> Iterator[Node]:
        gather = self._to_fetch.popleft()
        self._budget.fetched_taken += gather.fetched_bytes
        if gather.fetch:
            yield from gather.pack
        yield from self._labelled(gather.fetch, gather, node)

    def _spread_next(self, node: Node) -> Iterator[Node]:
        gather = self._to_spread.popleft()
        self._budget.full_taken += gather.full_bytes
        if not gather.fetch:
            yield from gather.pack
        yield from self._labelled(gather.spread, gather, node)
        heapq.heappush(self._to_free, (self._last_use(gather), self._order[gather.wait], gather))

    def _labelled(self, nodes: tuple[Node, ...], gather: Gather, node: Node) -> Iterator[Node]:
        early = self._number[gather.wait] - self._number[node]
        for start in nodes:
            step = start.meta[META].step
            label = f"{early} cuts early" if early else "just in time"
            start.meta[META] = replace(start.meta[META], step=replace(step, label=label))
            yield start

    def _free(self, *, before: int) -> Iterator[Node]:
        while self._to_free and self._to_free[0][0] < before:
            yield from heapq.heappop(self._to_free)[2].ends

    def _reduce(self, reduction: Reduction) -> Iterator[Node]:
        budget = self._budget
        while self._read and not budget.has_room_for(reduction):
            older = self._read.popleft()
            budget.reductions_taken -= older.packed_bytes
            with self._graph.inserting_before(self._graph.output_node()):
                yield wait_for(self._graph, older.starts[0])
        while self._reduced and not budget.has_room_for(reduction):
            older = self._reduced.popleft()
            has_halves = len(older.starts) > 1
            budget.reductions_taken -= older.reduced_bytes if has_halves else older.bytes
            yield older.wait
        yield from reduction.starts
        budget.reductions_taken += reduction.bytes
        if len(reduction.starts) > 1:
            self._read.append(reduction)
        self._reduced.append(reduction)


def _first(waiting: deque[Gather]) -> Gather | None:
    return waiting[0] if waiting else None


def _reorder(graph: Graph, clusters: dict[Node, list[Node]]) -> None:
    """Move the nodes of each cluster to the cluster's place; a node in several goes to the first."""
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
