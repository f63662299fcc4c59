"""Plan the graphs of one trace for one set of parameters, compile them and bind them to the model."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from torch.fx import GraphModule

from fcdp_compile.backend.codec_kernels import compile_codecs
from fcdp_compile.backend.compute import Compute
from fcdp_compile.backend.dump import Dump, trace
from fcdp_compile.backend.options import Options
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.graph.inline import clone, fake_mode
from fcdp_compile.passes.graph.runner import Stages
from fcdp_compile.passes.planning.alike import plan_alike
from fcdp_compile.passes.planning.book import BucketBook
from fcdp_compile.passes.planning.placement import Room
from fcdp_compile.passes.planning.plan_graphs import Planned, plan_accumulation, plan_graphs
from fcdp_compile.passes.segment import segment
from fcdp_compile.passes.set_apart import set_apart, shard_inputs
from fcdp_compile.plan import Direction, Plan, Tier, Variant
from fcdp_compile.plan.cost import Machine
from fcdp_compile.runtime.cache.device_memory import DeviceMemory
from fcdp_compile.runtime.lanes.marks import clock_of
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.program import Program
from fcdp_compile.runtime.recorder import Recorder
from fcdp_compile.runtime.run import CompiledPlan
from fcdp_compile.strategy import Cache

log = logging.getLogger(__name__)

_BOOKS: weakref.WeakKeyDictionary[ShardedModel, BucketBook] = weakref.WeakKeyDictionary()
"""The buckets of each model, which its later graphs share."""


class BoundGraphs:
    """The graphs of one trace with one set of parameters.

    compute: compiles equal segments of all sets once.  stages: gets the graphs after each pass, if given.
    """

    def __init__(
        self, options: Options, machine: Machine, compute: Compute, stages: Stages | None
    ) -> None:
        self._options = options
        self._machine = machine
        self._compute = compute
        self._stages = stages
        self._planned: Planned
        self._kept: Callable[[], Mapping[Direction, GraphModule]]  # with stamps
        self._places: dict[Direction, dict[str, int]]  # of home shards among their inputs
        self._lowered: dict[tuple[Direction, Variant], GraphModule] = {}
        self._dump: Dump | None = None

    # --- planning: no communication, nothing runs ---------------------------------------------------------

    def plan(
        self,
        model: ShardedModel,
        graphs: Mapping[Direction, GraphModule],
        *,
        num_fwd_outputs: int = 0,
    ) -> CompiledPlan:
        """Plan the graphs, which get stamps, and bind the plan to the model."""
        model.host_memory.ask(self._options.host_memory)
        for gm in graphs.values():
            model.outside.give_way(shard_places(gm))
        book = _book_of(model)
        self._planned = plan_graphs(
            graphs,
            book,
            self._room(model),
            self._context(model, book),
            number=len(model.plans),
            num_fwd_outputs=num_fwd_outputs,
            stages=self._stages,
        )
        # AOTAutograd goes on to change the graphs.
        kept = {direction: clone(gm) for direction, gm in graphs.items()}
        self._kept = lambda: kept
        self._places = {d: shard_places(gm) for d, gm in kept.items()}
        return self._bound_to(model, book)

    def plan_like(
        self, like: BoundGraphs, model: ShardedModel, keys: Mapping[str, str]
    ) -> CompiledPlan | None:
        """Plan the graphs of `like` for alike parameters, if the passes would plan them alike.

        keys: the new parameters by the old.
        """
        if self._options.dump is not None:  # the graphs after each pass are asked for
            return None
        book = _BOOKS[model]
        found = plan_alike(
            like._planned,
            keys,
            book,
            self._room(model),
            model.records.frozen(),
            number=len(model.plans),
            host_bytes=model.host_memory.budget.bytes,
        )
        if found is None:
            return None
        self._planned, others = found
        model.outside.give_way(keys.values())
        self._kept = lambda: {d: others.graph(gm) for d, gm in like._kept().items()}
        self._places = {
            d: {keys[k]: i for k, i in places.items()} for d, places in like._places.items()
        }
        return self._bound_to(model, book)

    def _bound_to(self, model: ShardedModel, book: BucketBook) -> CompiledPlan:
        planned = self._planned
        plan = planned.plan
        model.host_memory.planned_bytes = book.host_bytes
        model.host_memory.warn(planned.without_room, planned.wanting)
        model.add_plan(plan)
        self._lowered |= planned.lowered.graphs
        bound = CompiledPlan(plan, model, in_flight_bytes=self._options.in_flight_bytes)
        if self._options.dump is not None:
            self._dump = Dump(self._options.dump, model.number)
            if self._options.record:
                bound.recorder = Recorder(
                    self._options.record, clock_of(model.device), self._dump.write_recordings
                )
        if model.topology.ranks > 1:
            self._add_later(bound)
        log.info("%s", _summary(plan))
        self._show(plan, again=False)
        return bound

    def _add_later(self, bound: CompiledPlan) -> None:
        """Let the plan compile, when they are first needed, the variants that most users never run."""
        given = next(iter(self._places.values()))  # a backward compares only the forward's shards
        bound.shards = {
            d: {key: i for key, i in found.items() if key in given}
            for d, found in self._places.items()
        }
        bound.add_given = partial(self._add_given, bound)
        strategies = [b.strategy for b in bound.plan.buckets]
        if self._planned.backward is not None and any(s.accumulates_on for s in strategies):
            bound.add_accumulation = partial(self._add_accumulation, bound, self._planned.backward)

    def _context(self, model: ShardedModel, book: BucketBook) -> PassContext:
        return PassContext(
            nodes=model.topology.nodes,
            ranks_per_node=model.topology.ranks_per_node,
            node=model.topology.node,
            specs=book.specs,
            frozen=model.records.frozen(),
            known={},
            next_bucket=0,
            bucket_bytes=self._options.bucket_bytes,
            machine=self._machine,
            in_flight_bytes=self._options.in_flight_bytes,
            host_budget=model.host_memory.budget,
            decompositions=self._compute.decompositions(),
            inner_ranks=model.topology.inner_ranks,
        )

    def _room(self, model: ShardedModel) -> Room:
        """The device memory that an adaptive cache may use; at run time the cache asks the memory itself."""
        memory = None
        if any(strategy.cache is Cache.ADAPTIVE for strategy in model.strategies):
            asked = self._options.device_memory
            memory = model.transport.device_memory = DeviceMemory.of(
                model.device,
                capacity_bytes=model.gpu_bytes if asked is None else asked,
                threshold=self._options.memory_threshold,
            )
        return Room(
            capacity_bytes=None if memory is None else memory.capacity_bytes,
            threshold=self._options.memory_threshold,
            device_type=model.device.torch.type,
        )

    def _show(self, plan: Plan, *, again: bool) -> None:
        trace(plan, self._lowered)
        if self._dump is not None:
            self._dump.write(plan, self._lowered, self._stages or (), again=again)

    def _add_accumulation(self, bound: CompiledPlan, base: PassContext) -> None:
        """Lower and compile a backward's variants for accumulation, which most users never run."""
        backward = self._kept()[Direction.BACKWARD]
        model = bound.living_model()
        book = _book_of(model)
        # Other models may have planned to use host memory since.
        ctx = replace(base, host_budget=model.host_memory.budget)
        # In a fake mode, as within AOTAutograd, so that new tensors that passes make are fake too.
        with fake_mode(backward):
            bound.plan, graphs = plan_accumulation(bound.plan, backward, book, ctx, self._stages)
        model.host_memory.planned_bytes = book.host_bytes
        self._lowered |= graphs
        model.add_plan(bound.plan)
        for direction, variant in graphs:
            self._bind(bound, direction, variant)
        self._show(bound.plan, again=True)

    def _add_given(self, bound: CompiledPlan) -> None:
        """Compile the variants for calls with other values than the model's own; they are not planned."""
        for direction, gm in self._kept().items():
            with fake_mode(gm):
                self._lowered[direction, Variant.GIVEN] = segment(set_apart(clone(gm), every=True))
            self._bind(bound, direction, Variant.GIVEN)

    # --- compiling ----------------------------------------------------------------------------------------

    def bind(self, bound: CompiledPlan, direction: Direction) -> None:
        """Compile the graphs of one direction, and give the programs to the plan."""
        for of, variant in self._lowered:
            if of is direction:
                self._bind(bound, of, variant)

    def _bind(self, bound: CompiledPlan, direction: Direction, variant: Variant) -> None:
        lowered = self._lowered[direction, variant]
        names = [str(n.target) for n in lowered.graph.find_nodes(op="call_module")]
        model = bound.living_model()
        segments = {}
        with model.progress.compiling(len(names)) as compiled:
            for name in names:
                segments[name] = self._compute.compile(getattr(lowered, name))
                compiled()
        buckets = model.bound[bound.plan.graph]
        compile_codecs(lowered, buckets, self._compute, model.device.torch)
        bound.programs[direction, variant] = Program(lowered, segments, number=bound.plan.graph)
        bound.reads[direction, variant] = _read_inputs(lowered)


def _read_inputs(lowered: GraphModule) -> tuple[int, ...]:
    """The inputs that a graph uses in other ways than to return them."""
    inputs = lowered.graph.find_nodes(op="placeholder")
    return tuple(i for i, n in enumerate(inputs) if any(u.op != "output" for u in n.users))


def shard_places(gm: GraphModule) -> dict[str, int]:
    """The position of each key's home shard among a graph's inputs."""
    places = {n: i for i, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    return {key: places[n] for key, n in shard_inputs(gm.graph).items() if n is not None}


def _book_of(model: ShardedModel) -> BucketBook:
    """The buckets of a model; buckets whose parameters no longer all exist are left out."""
    if model not in _BOOKS:
        _BOOKS[model] = BucketBook({key: r.spec for key, r in model.records.items()})
    book = _BOOKS[model]
    book.living = {key for key, r in model.records.items() if r.living() is not None}
    return book


def _summary(plan: Plan) -> str:
    steps = sum(len(s.steps) for s in plan.schedules)
    frozen = sum(b.frozen for b in plan.buckets)
    kept = sum(p.tier in (Tier.GPU, Tier.GPU_FULL) for p in plan.placements)
    peak = "" if plan.peak_bytes is None else f", predicted peak {plan.peak_bytes / 2**20:.1f} MiB"
    return (
        f"graph {plan.graph}: {plan.strategy} on {plan.nodes} x {plan.ranks_per_node} ranks, "
        f"{len(plan.buckets)} buckets ({frozen} frozen, {kept} on the gpu), "
        f"{len(plan.schedules)} schedules, {steps} steps{peak}"
    )
