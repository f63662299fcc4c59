"""The plan of one strategy for a job, with its memory, bytes and time.

    traced graphs -> those of a mesh -> plan_graphs -> parts of a step -> simulate_step

The backend's own function makes the plans; nothing here depends on the strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch.fx import GraphModule

from fcdp_compile.backend.options import DEFAULT_THRESHOLD
from fcdp_compile.cluster.free_memory import HostBudget, Limit
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import Home, fit_strategy, param_spec, with_home
from fcdp_compile.errors import FcdpError
from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.graph.views import changes_nothing, same_values
from fcdp_compile.passes.memory.predict import left_bytes
from fcdp_compile.passes.pipeline import Graphs
from fcdp_compile.passes.planning.alike import plan_alike, renamed
from fcdp_compile.passes.planning.book import BucketBook
from fcdp_compile.passes.planning.placement import Room
from fcdp_compile.passes.planning.plan_graphs import Planned, plan_accumulation, plan_graphs
from fcdp_compile.plan import (
    Bucket,
    Direction,
    Kind,
    Placement,
    Plan,
    Schedule,
    Tier,
    Variant,
)
from fcdp_compile.plan.whole_step import part_of, whole_step
from fcdp_compile.strategy import Cache, Strategy
from fcdp_compile.strategy.home_nodes import home_nodes
from fcdp_compile.tools.planner.job import Job
from fcdp_compile.tools.planner.traced import TracedGraph, TracedModel
from fcdp_compile.tools.simulator import Collectives, Conditions, SimulatedStep, simulate_step

_SECOND = 2
"""The second batch size, in multiples of the job's: memory is linear in the batch, so two sizes suffice."""

# Adam reads and writes fp32 weight and two moments, and reads the gradient; taken for weights of any dtype.
_OPTIMIZER_BYTES = 3 * 2 * 4 + 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The figures of a strategy on a cluster.

    strategy: the requested strategy.  plans: one for each graph.  parts: the schedules of an optimizer step
    in the steady state, in order.  peak_gpu_bytes: peak memory of one device.  host_bytes_per_node: host
    memory for caches, waiting gradients and, where they are offloaded, home shards, their gradients and
    states.  optimizer_bytes, host_optimizer_bytes: memory that one rank's optimizer reads and writes on the
    device and on the host.
    max_batch_per_gpu: the largest micro-batch with which everything fits, 0 if none does; None if the model
    works with one batch size only.
    """

    strategy: Strategy
    job: Job
    plans: tuple[Plan, ...]
    parts: tuple[Schedule, ...]
    peak_gpu_bytes: int
    host_bytes_per_node: int
    optimizer_bytes: int
    host_optimizer_bytes: int
    max_batch_per_gpu: int | None

    @property
    def fits(self) -> bool:
        """Whether the memory of devices and hosts suffices."""
        job = self.job
        on_host = self.host_bytes_per_node <= job.host_bytes_per_rank * job.ranks_per_node
        return self.peak_gpu_bytes <= job.device_bytes and on_host

    def simulate(
        self,
        collectives: Collectives = Collectives.HIERARCHICAL,
        conditions: Conditions | None = None,
        job: Job | None = None,
    ) -> SimulatedStep:
        """Simulate a step on the job's cluster, or on that of another job with as many ranks."""
        job = job or self.job
        return simulate_step(
            self.parts,
            job.data_profile,
            nodes=job.nodes,
            ranks_per_node=job.mesh.ranks_per_node,
            buckets={b.id: b for plan in self.plans for b in plan.buckets},
            collectives=collectives,
            conditions=conditions or Conditions(),
            optimizer_bytes=self.optimizer_bytes,
            host_optimizer_bytes=self.host_optimizer_bytes,
        )


def estimate(traced: TracedModel, strategy: Strategy, job: Job) -> Estimate:
    """Plan a strategy for a job, without a cluster.

    Raises: ValueError for a strategy that makes no sense on so many nodes.
    """
    found = _Estimation(traced, strategy, job).run()
    reserved = 0
    for _ in range(3):
        over = found.peak_gpu_bytes - job.device_bytes
        adapts = any(plan.memory_limit_bytes is not None for plan in found.plans)
        if over <= 0 or not adapts or len(found.plans) == 1:
            break
        # An early graph filled the memory that a later graph needs.  At run time the cache then moves copies
        # away, which is as if the early graph had known.
        reserved += int(over / DEFAULT_THRESHOLD) + job.device_bytes // 100
        found = _Estimation(traced, strategy, job, reserved_bytes=reserved).run()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graph:
    """One graph of the model on a mesh.

    sizes: the values of its symbols, for two batch sizes.
    left_bytes: bytes of its forward's results and saved tensors on the device, for two batch sizes.
    gradient_bytes: bytes of gradients that its backward leaves for the optimizer.
    """

    graphs: Graphs
    outputs: int
    sizes: Sequence[Mapping[sympy.Symbol, int]]
    left_bytes: Sequence[int]
    gradient_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A planned call of a graph.

    backward: makes the graph of its backward; None without a backward.
    """

    graph: _Graph
    planned: Planned
    backward: Callable[[], GraphModule] | None


class _Estimation:
    def __init__(
        self, traced: TracedModel, strategy: Strategy, job: Job, *, reserved_bytes: int = 0
    ) -> None:
        self._traced, self._strategy, self._job = traced, strategy, job
        self._reserved_bytes = reserved_bytes
        if job.batch != traced.batch and not traced.has_any_batch:
            raise FcdpError(
                f"the model was traced with {traced.batch} samples and accepts no other number; allow "
                "any size of the first dimension of its inputs, remove graph breaks, or plan a "
                f"batch of {traced.batch}"
            )
        fitting = fit_strategy(strategy, job.mesh, shares_memory=job.profile.shares_memory)
        specs = specs_of(traced, fitting, job.mesh)
        self._book = BucketBook(specs)
        self._base = PassContext(
            nodes=job.nodes,
            ranks_per_node=job.mesh.ranks_per_node,
            node=job.mesh.node,
            specs=specs,
            frozen=frozenset(p.key for p in traced.params if not p.requires_grad),
            known={},
            next_bucket=0,
            machine=job.data_profile.rank_machine,
            inner_ranks=traced.inner_ranks,
            delta_bits=job.delta_bits,
        )
        self._host_bytes = max(0, job.host_bytes_per_rank - self._homes_on_host_bytes())
        budget = HostBudget(bytes=self._host_bytes, limit=Limit.AVAILABLE)
        self._base = replace(self._base, host_budget=budget)

    def run(self) -> Estimate:
        graphs = [self._on_mesh(graph) for graph in self._traced.graphs]
        calls: list[_Call] = []
        needed: tuple[list[int], list[int]] = ([], [])
        saved = [0, 0]
        # When an earlier graph's backward runs, the gradients of all later graphs exist already.
        later = sum(graphs[call.graph].gradient_bytes for call in self._traced.calls)
        likes: dict[int, _Call] = {}  # the first call of each graph
        for call in self._traced.calls:
            graph = graphs[call.graph]
            later -= graph.gradient_bytes
            # What other calls of this graph save, planning counts itself.
            beside = saved[0] - graph.left_bytes[0] * sum(c.graph is graph for c in calls)
            number, room = len(calls), self._room(beside + later)
            made = self._again(likes.get(call.graph), call.keys, number, room)
            if made is None:
                own = graph.graphs
                if call.graph in likes:  # planning has changed its graphs
                    own = self._on_mesh(self._traced.graphs[call.graph], call.keys).graphs
                made = self._planned(graph, own, number, room)
            likes.setdefault(call.graph, made)
            calls.append(made)
            more = self._needed(graph, made.planned, [n + later for n in saved])
            for found, points in zip(needed, more, strict=True):
                found.extend(points)
            saved = [sum(pair) for pair in zip(saved, graph.left_bytes, strict=True)]
        plans = self._with_accumulation(calls)
        step = whole_step(plans)
        parts = tuple(self._parts(step))
        waiting = _waiting_bytes(plans, _distinct(plans))
        peak = max(p.peak_bytes or 0 for p in (step, *plans))
        return Estimate(
            strategy=self._strategy,
            job=self._job,
            plans=tuple(plans),
            parts=parts,
            peak_gpu_bytes=peak + waiting[Tier.GPU],
            host_bytes_per_node=self._job.ranks_per_node
            * (self._cached_bytes(plans) + waiting[Tier.HOST] + self._homes_on_host_bytes()),
            optimizer_bytes=_OPTIMIZER_BYTES * self._trained_elements(on_host=False),
            host_optimizer_bytes=_OPTIMIZER_BYTES * self._trained_elements(on_host=True),
            max_batch_per_gpu=self._max_batch(needed, plans, [call.planned for call in calls]),
        )

    def _on_mesh(self, traced: TracedGraph, keys: Mapping[str, str] | None = None) -> _Graph:
        """A graph on the mesh.  keys: as in `TracedCall`, if it is not called for the first time."""
        sizes = [traced.sizes(n) for n in (self._job.batch, _SECOND * self._job.batch)]
        return _Graph(
            graphs={
                d: _resized(renamed(gm, keys or {}), self._base.specs)
                for d, gm in traced.graphs.items()
            },
            outputs=traced.outputs,
            sizes=sizes,
            left_bytes=[left_bytes(traced.first, s, DEVICE.type) for s in sizes],
            gradient_bytes=self._gradient_shard_bytes(traced.graphs.get(Direction.BACKWARD)),
        )

    def _gradient_shard_bytes(self, backward: GraphModule | None) -> int:
        """Return the bytes that a backward leaves for the optimizer; 0 if they are counted for the step."""
        if self._job.accumulate > 1 or backward is None:
            return 0
        nodes = backward.graph.find_nodes(op="call_function", target=REDUCE_GRAD)
        specs = [self._base.specs[key] for key in {str(n.args[1]) for n in nodes}]
        return sum(s.home_bytes for s in specs if s.computes_on is None)

    def _again(
        self, like: _Call | None, keys: Mapping[str, str], number: int, room: Room
    ) -> _Call | None:
        """Plan another call of a graph like its first call, if the passes would plan it alike."""
        if like is None:
            return None
        found = plan_alike(
            like.planned,
            keys,
            self._book,
            room,
            self._base.frozen,
            number=number,
            host_bytes=self._host_bytes,
        )
        if found is None:
            return None
        planned, others = found
        backward = None if (made := like.backward) is None else lambda: others.graph(made())
        return replace(like, planned=self._asked(planned), backward=backward)

    def _planned(self, graph: _Graph, own: Graphs, number: int, room: Room) -> _Call:
        planned = plan_graphs(
            own,
            self._book,
            room,
            replace(self._base, sizes=graph.sizes[0]),
            number=number,
            num_fwd_outputs=graph.outputs,
        )
        stamped = own.get(Direction.BACKWARD)
        backward = None if stamped is None else lambda: stamped
        return _Call(graph=graph, planned=self._asked(planned), backward=backward)

    def _room(self, taken_bytes: int) -> Room:
        adapts = any(s.strategy.cache is Cache.ADAPTIVE for s in self._base.specs.values())
        return Room(
            capacity_bytes=self._job.profile.device_memory_bytes - self._reserved_bytes
            if adapts
            else None,
            threshold=DEFAULT_THRESHOLD,
            taken_bytes=taken_bytes,
            device_type=DEVICE.type,
            accumulates=self._job.accumulate > 1,
        )

    def _asked(self, planned: Planned) -> Planned:
        """With the requested strategy: the mesh may have changed it, or the graph may read no parameter."""
        return replace(planned, plan=replace(planned.plan, strategy=self._strategy.name))

    def _with_accumulation(self, calls: Sequence[_Call]) -> list[Plan]:
        """Return the plans; if gradients accumulate, with the backwards within and after `no_sync`."""
        plans = [call.planned.plan for call in calls]
        for i in reversed(range(len(plans))):  # as backwards run
            ctx, backward = calls[i].planned.backward, calls[i].backward
            accumulates = any(b.strategy.accumulates_on for b in plans[i].buckets)
            if (
                self._job.accumulate > 1
                and accumulates
                and ctx is not None
                and backward is not None
            ):
                plans[i], _ = plan_accumulation(plans[i], backward(), self._book, ctx)
        return plans

    def _needed(self, graph: _Graph, planned: Planned, saved: Sequence[int]) -> Iterator[list[int]]:
        """Yield the memory at each point of a graph's step if everything that may wait on the host does so.

        For two batch sizes.
        """
        for sizes, earlier in zip(graph.sizes, saved, strict=True):
            step = planned.memory.at(sizes)
            yield [step.static_bytes + earlier + alive for alive in step.alive_bytes]

    def _parts(self, step: Plan) -> Iterator[Schedule]:
        """Yield the schedules of an optimizer step: for each micro-batch a forward and a backward."""
        last = self._job.accumulate - 1
        for i in range(self._job.accumulate):
            variants = {
                Direction.FORWARD: Variant.WARM if i else Variant.COLD,
                Direction.BACKWARD: Variant.COLLECT if i == last else Variant.ACCUMULATE,
            }
            for direction, variant in variants.items():
                part = part_of(step, direction, variant)
                assert part is not None, f"a training step has a {direction.value}"
                yield part

    def _cached_bytes(self, plans: Sequence[Plan]) -> int:
        return sum(b.host_bytes for b, at in _distinct(plans) if at.tier is Tier.HOST)

    def _homes_on_host_bytes(self) -> int:
        """Home shards, gradients and optimizer states of one rank that are in host memory."""
        return sum(
            spec.taken_bytes(is_frozen=key in self._base.frozen)
            for key, spec in self._base.specs.items()
            if spec.computes_on is not None
        )

    def _trained_elements(self, *, on_host: bool) -> int:
        """Elements of one rank's trainable home shards in one of the memories."""
        specs, frozen = self._base.specs.items(), self._base.frozen
        trained = [s for key, s in specs if key not in frozen]
        return sum(s.mean_elements for s in trained if (s.computes_on is not None) == on_host)

    def _max_batch(
        self,
        needed: tuple[Sequence[int], Sequence[int]],
        plans: Sequence[Plan],
        planned: Sequence[Planned],
    ) -> int | None:
        """Return the largest batch whose memory suffices at every point; memory is linear in the batch.

        needed: point by point, for this batch and for one `_SECOND` times as large.
        """
        if not self._traced.has_any_batch:
            return None
        # Gradients that may wait on the GPU or the host wait on the host if the GPU has no room.
        placed = {u.bucket.id: (u.bucket, u.placement) for p in planned for u in p.lowered.placed}
        left = self._job.device_bytes - _waiting_bytes(plans, list(placed.values()))[Tier.GPU]
        batch, more = self._job.batch, self._job.batch * (_SECOND - 1)
        largest = None
        for now, then in zip(*needed, strict=True):
            if then > now:
                found = (left * more - now * more + (then - now) * batch) // (then - now)
                largest = found if largest is None else min(found, largest)
            elif now > left:
                return 0
        return None if largest is None else max(0, largest)


def _distinct(plans: Sequence[Plan]) -> list[tuple[Bucket, Placement]]:
    return list({pair[0].id: pair for plan in plans for pair in plan.placed}.values())


def _waiting_bytes(
    plans: Sequence[Plan], placed: Sequence[tuple[Bucket, Placement]]
) -> dict[Tier, int]:
    """Return the bytes of one rank's gradients that wait for the last micro-batch, by tier.

    placed: the buckets to count, with their placements.
    """
    steps = [s for plan in plans for part in plan.schedules for s in part.steps]
    waiting = {s.bucket for s in steps if s.kind is Kind.ACCUMULATE}
    found = dict.fromkeys(Tier, 0)
    for bucket, placement in placed:
        if bucket.id in waiting:
            found[placement.gradient_tier] += bucket.waiting_gradient_bytes
    return found


DEVICE = torch.device("cpu")
"""Graphs are traced with fake tensors of the CPU, for all devices."""


def specs_of(traced: TracedModel, strategy: Strategy, mesh: Home) -> dict[str, ParamSpec]:
    """Return the spec of every parameter, by key.

    strategy: as fitted to the mesh.
    """
    matrices = [p for p in traced.params if p.is_matrix and strategy.whole_matrices]
    nodes = home_nodes([(p.shape, p.dtype.itemsize) for p in matrices], mesh.nodes)
    homes = dict(zip([p.key for p in matrices], nodes, strict=True))
    specs = {
        p.key: param_spec(
            p.key,
            p.name,
            shape=p.shape,
            dtype=p.dtype,
            strategy=strategy,
            mesh=mesh,
            param_dtype=p.gather_dtype,
            is_packed=p.is_packed,
            home_node=homes.get(p.key),
            kept_dim=p.kept_dim,
        )
        for p in traced.params
    }
    return {
        p.key: with_home(specs[p.key], DEVICE, is_frozen=not p.requires_grad) for p in traced.params
    }


def _resized(gm: GraphModule, specs: Mapping[str, ParamSpec]) -> GraphModule:
    """Give a graph the home shards and gradients of a mesh, and return it.

    specs: of every parameter on the mesh, by key.
    """
    for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
        shape = specs[str(node.args[1])].local_shape
        home = node.args[0]
        for seen in [same_values(home), home]:
            if tuple(seen.meta["val"].shape) != shape:
                seen.meta["val"] = seen.meta["val"].new_empty(shape)
    for node in gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        for seen in [*filter(changes_nothing, node.users), node]:
            seen.meta["val"] = node.meta["val"].new_empty(specs[str(node.args[1])].local_shape)
    return gm
