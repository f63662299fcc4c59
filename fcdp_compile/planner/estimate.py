"""The plan of one strategy for a job, and what it comes to: memory, bytes, time.

    traced graphs -> retarget -> lower_all -> place_all -> plans -> parts of a step -> simulate_step

The plans are those that the backend would make; nothing here knows a strategy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import sympy
from torch import Tensor
from torch.fx import GraphModule

from fcdp_compile.errors import FcdpError
from fcdp_compile.host_memory import HostBudget, Limit
from fcdp_compile.lowering import Lowered, lower_all, lower_variant, used_again
from fcdp_compile.passes.bucket import host_bytes_taken, reduced_params
from fcdp_compile.passes.choose_tiers import place_steps
from fcdp_compile.passes.context import PassContext
from fcdp_compile.passes.inline import Inliner
from fcdp_compile.passes.memory import evaluate, storages
from fcdp_compile.passes.place_gradients import fit_gradients, gradient_bytes
from fcdp_compile.passes.predict import predict
from fcdp_compile.placement import Placed, Room, place_all
from fcdp_compile.plan import Bucket, Direction, Kind, Lane, Plan, Schedule, Tier, Variant
from fcdp_compile.planner.job import Job
from fcdp_compile.planner.retarget import KnownBuckets, Retargeted, specs_of
from fcdp_compile.planner.traced import TRACED_BATCH, TracedModel
from fcdp_compile.simulator import Collectives, Conditions, SimulatedStep, simulate_step
from fcdp_compile.specs import fit_strategy
from fcdp_compile.strategy import Strategy

_THRESHOLD = 0.9  # tau, the default of the backend's option memory_threshold
_DEVICE = "cpu"  # graphs are traced with fake tensors of the CPU, whatever they will run on
_SECOND = 2
"""Each moment's memory is a straight line over batch sizes: read off at two of them it is known for all."""

# fp32 weight and two moments read and written, the gradient read: Adam's, whatever the weight's dtype is.
_OPTIMIZER_BYTES = 3 * 2 * 4 + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a strategy comes to on a cluster.

    strategy: as it was asked for.  plans: one for each graph.  parts: the schedules of an optimizer step in
    the steady state, in their order.  peak_gpu_bytes: of one device.  host_bytes_per_node: of caches and
    waiting gradients.  inter_bytes_per_step: sent by one node to others.  max_batch_per_gpu: the largest
    micro-batch with which everything fits, 0 if none does; None if the model works with one batch size only.
    """

    strategy: Strategy
    job: Job
    plans: tuple[Plan, ...]
    parts: tuple[Schedule, ...]
    peak_gpu_bytes: int
    host_bytes_per_node: int
    inter_bytes_per_step: int
    optimizer_bytes: int
    max_batch_per_gpu: int | None

    @property
    def fits(self) -> bool:
        """Whether devices and hosts have room for it."""
        job = self.job
        on_host = self.host_bytes_per_node <= job.host_bytes_per_rank * job.ranks_per_node
        return self.peak_gpu_bytes <= job.device_bytes and on_host

    def simulate(
        self,
        collectives: Collectives = Collectives.HIERARCHICAL,
        conditions: Conditions | None = None,
        job: Job | None = None,
    ) -> SimulatedStep:
        """Run a step on the cluster, or that of another job with as many ranks."""
        job = job or self.job
        return simulate_step(
            self.parts,
            job.profile,
            nodes=job.nodes,
            ranks_per_node=job.ranks_per_node,
            buckets={b.id: b for plan in self.plans for b in plan.buckets},
            collectives=collectives,
            conditions=conditions or Conditions(),
            optimizer_bytes=self.optimizer_bytes,
        )


def estimate(traced: TracedModel, strategy: Strategy, job: Job) -> Estimate:
    """Plan a strategy for a job, without a cluster.

    Raises: ValueError for a strategy that makes no sense on so many nodes.
    """
    return _Estimation(traced, strategy, job).run()


class _Moment(NamedTuple):
    """Bytes of the device at one position of a graph, for two batch sizes."""

    first: int
    second: int


@dataclass(slots=True, kw_only=True)
class _Graph:
    """One graph of the model on its way.

    left_bytes: what its forward leaves on the device for its backward and the caller, for two batch sizes.
    """

    retargeted: Retargeted
    lowered: Lowered
    left_bytes: tuple[int, int]
    placed: Placed | None = None
    accumulating: tuple[Schedule, ...] = ()


class _Estimation:
    def __init__(self, traced: TracedModel, strategy: Strategy, job: Job) -> None:
        self._traced, self._strategy, self._job = traced, strategy, job
        if job.batch != TRACED_BATCH and not traced.has_any_batch:
            raise FcdpError(
                f"the model was traced with {TRACED_BATCH} samples and takes no other number; let the first "
                f"dimension of its inputs be any batch, or plan a batch of {TRACED_BATCH}"
            )
        # Gradients of later graphs are there, too, when an earlier one's backward runs.
        self._accumulates = job.accumulate > 1 or len(traced.graphs) > 1
        self._sizes = [traced.sizes(n) for n in (job.batch, _SECOND * job.batch)]
        self._base = PassContext(
            nodes=job.nodes,
            ranks_per_node=job.ranks_per_node,
            specs=specs_of(traced, fit_strategy(strategy, job.mesh), job.mesh),
            frozen=frozenset(p.key for p in traced.params if not p.requires_grad),
            known={},
            next_bucket=0,
            machine=job.profile.machine,
            host_budget=HostBudget(bytes=job.host_bytes_per_rank, limit=Limit.AVAILABLE),
            sizes=self._sizes[0],
            inliner=Inliner(),
        )

    def run(self) -> Estimate:
        graphs = self._lowered()
        plans: list[Plan] = []
        moments: set[_Moment] = set()
        taken_bytes = 0
        saved = [0, 0]
        for number, graph in enumerate(graphs):
            moments |= self._moments(graph, saved)
            placed, taken = self._place(graph, taken_bytes, saved[0])
            graph.placed = placed
            taken_bytes += sum(taken.values())
            saved = [sum(pair) for pair in zip(saved, graph.left_bytes, strict=True)]
            plans.append(self._plan(number, graph, placed))
        parts = tuple(self._parts(graphs))
        waiting = self._waiting_bytes(plans)
        peak = max(p.peak_bytes or 0 for p in plans)
        return Estimate(
            strategy=self._strategy,
            job=self._job,
            plans=tuple(plans),
            parts=parts,
            peak_gpu_bytes=peak + waiting[Tier.GPU],
            host_bytes_per_node=self._job.ranks_per_node
            * (self._cached_bytes(plans) + waiting[Tier.HOST]),
            inter_bytes_per_step=sum(sent_by_node(s, self._job.ranks_per_node) for s in parts),
            optimizer_bytes=self._optimizer_bytes(),
            max_batch_per_gpu=self._max_batch(moments, waiting[Tier.GPU]),
        )

    def _lowered(self) -> list[_Graph]:
        known = KnownBuckets(self._base)
        graphs = []
        for traced in self._traced.graphs:
            retargeted = known.retarget(traced)
            lowered = lower_all(retargeted.graphs, retargeted.contexts)
            graphs.append(
                _Graph(
                    retargeted=retargeted,
                    lowered=lowered,
                    left_bytes=(
                        _left_bytes(traced.forward, self._sizes[0]),
                        _left_bytes(traced.forward, self._sizes[1]),
                    ),
                    accumulating=self._accumulating(retargeted, lowered),
                )
            )
        return graphs

    def _accumulating(self, retargeted: Retargeted, lowered: Lowered) -> tuple[Schedule, ...]:
        """The variants of a backward within `no_sync` and after it, if the job asks for them."""
        waits = any(b.strategy.accumulates_on for b in lowered.buckets)
        if self._job.accumulate == 1 or not waits:
            return ()
        backward = retargeted.graphs[Direction.BACKWARD]
        ctx = replace(
            retargeted.contexts[Direction.BACKWARD], backward_buckets=used_again(retargeted.graphs)
        )
        ctx = _with_gradients_on_host(backward, ctx)
        return tuple(
            lower_variant(backward, replace(ctx, variant=variant))[1]
            for variant in (Variant.ACCUMULATE, Variant.COLLECT)
        )

    def _moments(self, graph: _Graph, saved: Sequence[int]) -> set[_Moment]:
        """What a graph's step takes, with everything on the host that may wait there."""
        found = []
        for sizes, earlier in zip(self._sizes, saved, strict=True):
            step = predict(
                graph.retargeted.graphs,
                graph.lowered.graphs,
                graph.lowered.buckets,
                replace(self._base, sizes=sizes),
                device_type=_DEVICE,
                accumulates=self._accumulates,
            )
            found.append([step.static_bytes + earlier + alive for alive in (0, *step.alive_bytes)])
        first, second = found
        return {_Moment(*pair) for pair in zip(first, second, strict=True)}

    def _place(
        self, graph: _Graph, taken_bytes: int, saved_bytes: int
    ) -> tuple[Placed, dict[int, int]]:
        return place_all(
            graph.retargeted.graphs,
            graph.lowered,
            self._base,
            Room(
                capacity_bytes=self._job.profile.device_memory_bytes,
                threshold=_THRESHOLD,
                taken_bytes=taken_bytes + saved_bytes,
            ),
            device_type=_DEVICE,
            accumulates=self._accumulates,
        )

    def _plan(self, number: int, graph: _Graph, placed: Placed) -> Plan:
        return Plan(
            strategy=self._strategy.name,
            nodes=self._job.nodes,
            ranks_per_node=self._job.ranks_per_node,
            graph=number,
            buckets=placed.buckets,
            refresh=graph.lowered.refresh,
            schedules=placed.schedules,
            peak_bytes=placed.peak_bytes,
            memory_limit_bytes=placed.limit_bytes,
        )

    def _parts(self, graphs: Sequence[_Graph]) -> Iterator[Schedule]:
        """The schedules of an optimizer step: forwards in order, backwards the other way round."""
        last = self._job.accumulate - 1
        for micro_batch in range(self._job.accumulate):
            for graph in graphs:
                yield _forward(graph, is_first=micro_batch == 0)
            for graph in reversed(graphs):
                yield _backward(graph, is_last=micro_batch == last)

    def _waiting_bytes(self, plans: Sequence[Plan]) -> dict[Tier, int]:
        """Bytes of one rank's gradients that wait for the last micro-batch."""
        found = dict.fromkeys(Tier, 0)
        if self._job.accumulate > 1:
            for bucket in _distinct(plans):
                if not bucket.frozen:
                    found[bucket.gradient_tier] += gradient_bytes(bucket)
        return found

    def _cached_bytes(self, plans: Sequence[Plan]) -> int:
        return sum(b.host_bytes for b in _distinct(plans) if b.tier is Tier.HOST)

    def _optimizer_bytes(self) -> int:
        trained = (s for k, s in self._base.specs.items() if k not in self._base.frozen)
        return _OPTIMIZER_BYTES * sum(spec.layout.slot_elements for spec in trained)

    def _max_batch(self, moments: Iterable[_Moment], waiting_bytes: int) -> int | None:
        if not self._traced.has_any_batch:
            return None
        room_bytes, batch = self._job.device_bytes - waiting_bytes, self._job.batch
        most = []
        for first, second in moments:
            if second > first:
                more = (room_bytes - first) * batch * (_SECOND - 1) // (second - first)
                most.append(max(0, batch + more))
            elif first > room_bytes:
                return 0
        return min(most, default=None)


def sent_by_node(schedule: Schedule, ranks_per_node: int) -> int:
    """Bytes that one node sends to others in a schedule."""
    total = 0
    for step in schedule.steps:
        if step.lane is Lane.INTER:
            # One rank of a node passes a flat ring on to the next node.
            ranks = 1 if step.kind is Kind.FLAT_ALL_GATHER else ranks_per_node
            total += ranks * step.bytes
    return total


def _forward(graph: _Graph, *, is_first: bool) -> Schedule:
    found = _of(graph, Direction.FORWARD)
    wanted = Variant.COLD if is_first else Variant.WARM
    return found.get(wanted) or next(iter(found.values()))


def _backward(graph: _Graph, *, is_last: bool) -> Schedule:
    found = _of(graph, Direction.BACKWARD)
    wanted = Variant.COLLECT if is_last else Variant.ACCUMULATE
    return found.get(wanted) or found[Variant.COLD]


def _of(graph: _Graph, direction: Direction) -> dict[Variant, Schedule]:
    assert graph.placed is not None, "graphs are placed before a step is put together"
    waiting = [place_steps(s, graph.placed.buckets) for s in graph.accumulating]
    schedules = (*graph.placed.schedules, *waiting)
    return {s.variant: s for s in schedules if s.direction is direction}


def _distinct(plans: Sequence[Plan]) -> list[Bucket]:
    return list({b.id: b for plan in plans for b in plan.buckets}.values())


def _with_gradients_on_host(backward: GraphModule, ctx: PassContext) -> PassContext:
    """A context whose gradients wait only if the host has room for them."""
    assert ctx.host_budget is not None, "a job says what hosts have"
    reduced = list(reduced_params(backward, ctx))
    left = ctx.host_budget.bytes - host_bytes_taken(ctx)
    now = dict(zip(reduced, fit_gradients(reduced, host_bytes=left), strict=True))
    known = {key: tuple(now.get(b, b) for b in found) for key, found in ctx.known.items()}
    return replace(ctx, known=known)


def _left_bytes(forward: GraphModule, sizes: Mapping[sympy.Symbol, int]) -> int:
    """What a forward leaves on the device: its results and what it saves, but not its inputs."""
    inputs = storages(
        (n.meta.get("val") for n in forward.graph.find_nodes(op="placeholder")), _DEVICE
    )
    outputs = forward.graph.output_node().all_input_nodes
    values = [n.meta.get("val") for n in outputs]
    left = storages((v for v in values if isinstance(v, Tensor)), _DEVICE)
    return sum(evaluate(size, sizes) for s, size in left.items() if s not in inputs)
