"""`torch.compile(model, backend="fcdp")`: the pipeline from a Dynamo graph to a bound program.

    Dynamo graph -> AOTAutograd's joint graph -> partition -> bucket -> stamp
                 -> lowering -> placement -> plan -> programs

Only this module and `codec_kernels` know both the passes and the runtime.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from fcdp_compile.backend.codec_kernels import compile_codecs
from fcdp_compile.backend.compute import Compute, inductor_settings
from fcdp_compile.backend.dump import Dump, trace
from fcdp_compile.backend.options import Options
from fcdp_compile.backend.writes import refuse_writes
from fcdp_compile.errors import FcdpError, UnshardedParameterError
from fcdp_compile.ops import UNSHARD
from fcdp_compile.params import registry
from fcdp_compile.params.home_shard import bring_back_inputs
from fcdp_compile.params.mesh import process_count
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.graph.runner import Stages, watched
from fcdp_compile.passes.memory.placement import Room
from fcdp_compile.passes.partition import mark_constant, partition
from fcdp_compile.passes.planning.book import BucketBook
from fcdp_compile.passes.planning.plan_graphs import (
    Planned,
    plan_accumulation,
    plan_graphs,
)
from fcdp_compile.passes.segment import segment
from fcdp_compile.passes.set_apart import set_apart, shard_inputs
from fcdp_compile.passes.variants import clone
from fcdp_compile.plan import Direction, Plan, Tier, Variant
from fcdp_compile.quantised.weight import QuantisedWeight
from fcdp_compile.runtime.cache.device_memory import DeviceMemory
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.program import Program
from fcdp_compile.runtime.recorder import Recorder, clock_of
from fcdp_compile.runtime.run import CompiledPlan
from fcdp_compile.sharding.refusals import is_ignored
from fcdp_compile.strategy import Cache
from fcdp_compile.torch_compat import (
    FakeTensorMode,
    aot_autograd,
    as_boxed,
    detect_fake_mode,
    min_cut_rematerialization_partition,
    unwritten_inputs,
    without_code,
)

log = logging.getLogger(__name__)


def fcdp(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Callable[..., Any]:
    """Compile one Dynamo graph; torch.compile calls this.

    mode: torch.compile's mode, for the segments; modes with CUDA graphs are refused.

    Raises: ValueError or TypeError for a bad mode or options, UnshardedParameterError for a parameter that
    `shard` has not seen while several processes run, FcdpError for a forward that writes to a parameter.
    """
    settings = inductor_settings(mode)
    checked = Options.parse({**(options or {}), **more})
    _refuse_unsharded(gm, example_inputs)
    refuse_writes(gm)
    if settings:  # a mode needs Inductor, even if ATen's kernels are the default
        checked = replace(checked, compute=checked.compute or "inductor")
    return _Compilation(checked, example_inputs, settings).compile(gm, example_inputs)


def _refuse_unsharded(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    if (world := process_count()) == 1:
        return
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        if isinstance(value, nn.Parameter) and not (
            isinstance(value, DTensor) or is_ignored(value)
        ):
            raise UnshardedParameterError(
                f"{node.name}, a parameter of shape {tuple(value.shape)}, is not sharded but "
                f"{world} processes run, so nothing would average its gradient; call "
                "fcdp_compile.shard on the whole model, after adding adapters and before torch.compile"
            )


_BOOKS: weakref.WeakKeyDictionary[ShardedModel, BucketBook] = weakref.WeakKeyDictionary()
"""The buckets of each model, which its later graphs share."""


class _Compilation:
    """One Dynamo graph on its way through AOTAutograd, which calls this object for each part."""

    def __init__(
        self, options: Options, example_inputs: Sequence[Any], settings: Mapping[str, Any]
    ) -> None:
        self._options = options
        device_type = _device_type(example_inputs)
        self._machine = options.machine_on(device_type)
        kind = Compute.available(options.compute_on(device_type), device_type)
        self._compute = Compute(kind, settings)
        self._inputs = [id(value) for value in example_inputs]
        self._bound: CompiledPlan | None = None
        self._lowered: dict[tuple[Direction, Variant], GraphModule] = {}
        self._dump: Dump | None = None
        self._stages: Stages | None = None if options.dump is None else []

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiler = aot_autograd(
            fw_compiler=partial(self._compile, Direction.FORWARD),
            bw_compiler=partial(self._compile, Direction.BACKWARD),
            inference_compiler=partial(self._compile, Direction.INFERENCE),
            partition_fn=self._partition,
            decompositions=self._compute.decompositions(),
            keep_inference_input_mutations=True,
        )
        with without_code():
            compiled: Callable[..., Any] = compiler(gm, example_inputs)
        return compiled

    # --- planning: no communication, nothing runs ---------------------------------------------------------

    def _partition(
        self, joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        joint = self._set_apart("joint", joint)
        if (model := _model_of(joint)) is not None:
            scales = {id(tensor) for tensor in _scales_of(model)}
            of_weights = {i for i, value in enumerate(self._inputs) if value in scales}
            mark_constant(unwritten_inputs(joint, of_weights))

        def cut() -> dict[str, GraphModule]:
            halves = partition(
                self._compute.prepare_joint(joint),
                joint_inputs,
                num_fwd_outputs=num_fwd_outputs,
                partitioner=min_cut_rematerialization_partition,
                **options,
            )
            return dict(zip(("forward", "backward"), halves, strict=True))

        both = watched("partition", {"joint": joint}, cut, self._stages)
        fw, bw = both.values()
        if (model := _model_of(fw)) is not None:
            graphs = {Direction.FORWARD: fw, Direction.BACKWARD: bw}
            self._plan(model, graphs, num_fwd_outputs=num_fwd_outputs)
        return fw, bw

    def _plan(
        self,
        model: ShardedModel,
        graphs: dict[Direction, GraphModule],
        *,
        num_fwd_outputs: int = 0,
    ) -> None:
        """Plan the graphs and bind the plan to the model."""
        model.host_memory.ask(self._options.host_memory)
        for gm in graphs.values():
            model.outside.give_way(_shard_places(gm))
        book = _book_of(model)
        planned = plan_graphs(
            graphs,
            book,
            self._room(model),
            self._context(model, book),
            number=len(model.plans),
            num_fwd_outputs=num_fwd_outputs,
            stages=self._stages,
        )
        plan = planned.plan
        model.host_memory.planned_bytes = book.host_bytes
        model.host_memory.warn(planned.without_room, planned.wanting)
        model.add_plan(plan)
        self._lowered |= planned.lowered.graphs
        self._bound = bound = CompiledPlan(plan, model)
        if self._options.dump is not None:
            self._dump = Dump(self._options.dump, model.number)
            if self._options.record:
                bound.recorder = Recorder(
                    self._options.record, clock_of(model.device), self._dump.write_recordings
                )
        if model.topology.ranks > 1:
            self._keep(bound, graphs, planned)
        log.info("%s", _summary(plan))
        self._show(plan, again=False)

    def _keep(
        self, bound: CompiledPlan, graphs: Mapping[Direction, GraphModule], planned: Planned
    ) -> None:
        """Let the plan compile, when they are first needed, the variants that most users never run."""
        # AOTAutograd goes on to change the graphs.
        kept = {direction: clone(gm) for direction, gm in graphs.items()}
        places = {d: _shard_places(gm) for d, gm in kept.items()}
        given = next(iter(places.values()))  # a backward compares only the forward's shards
        bound.shards = {
            d: {key: i for key, i in found.items() if key in given} for d, found in places.items()
        }
        bound.add_given = partial(self._add_given, bound, kept)
        strategies = [b.strategy for b in planned.plan.buckets]
        if planned.backward is not None and any(s.accumulates_on for s in strategies):
            bound.add_accumulation = partial(
                self._add_accumulation, bound, kept[Direction.BACKWARD], planned.backward
            )

    def _context(self, model: ShardedModel, book: BucketBook) -> PassContext:
        return PassContext(
            nodes=model.topology.nodes,
            ranks_per_node=model.topology.ranks_per_node,
            specs=book.specs,
            frozen=frozenset(
                key
                for key, r in model.records.items()
                if (p := r.living()) is not None and not p.requires_grad
            ),
            known={},
            next_bucket=0,
            bucket_bytes=self._options.bucket_bytes,
            machine=self._machine,
            in_flight_bytes=self._options.in_flight_bytes,
            host_budget=model.host_memory.budget,
            decompositions=self._compute.decompositions(),
        )

    def _room(self, model: ShardedModel) -> Room:
        """The device memory that an adaptive cache may use; at run time the cache asks the memory itself."""
        memory = None
        if any(strategy.cache is Cache.ADAPTIVE for strategy in model.strategies):
            asked = self._options.device_memory
            memory = model.cache.memory = DeviceMemory.of(
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

    def _add_accumulation(
        self, bound: CompiledPlan, backward: GraphModule, base: PassContext
    ) -> None:
        """Lower and compile a backward's variants for accumulation, which most users never run."""
        model = bound.living_model()
        book = _book_of(model)
        # Other models may have planned to use host memory since.
        ctx = replace(base, host_budget=model.host_memory.budget)
        # In a fake mode, as within AOTAutograd, so that new tensors that passes make are fake too.
        with _fake_mode(backward):
            bound.plan, graphs = plan_accumulation(bound.plan, backward, book, ctx, self._stages)
        model.host_memory.planned_bytes = book.host_bytes
        self._lowered |= graphs
        for direction, variant in graphs:
            self._bind(bound, direction, variant)
        model.add_plan(bound.plan)
        self._show(bound.plan, again=True)

    def _add_given(self, bound: CompiledPlan, graphs: Mapping[Direction, GraphModule]) -> None:
        """Compile the variants for calls with other values than the model's own; they are not planned."""
        for direction, gm in graphs.items():
            with _fake_mode(gm):
                self._lowered[direction, Variant.GIVEN] = segment(set_apart(clone(gm), every=True))
            self._bind(bound, direction, Variant.GIVEN)

    # --- compiling ----------------------------------------------------------------------------------------

    def _compile(self, direction: Direction, gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        if direction is Direction.INFERENCE:
            self._set_apart(direction.value, gm)
        model = _model_of(gm)
        if model is not None and direction is Direction.INFERENCE:
            self._plan(model, {direction: gm})
        bound = self._bound
        if bound is None:
            return as_boxed(_reading(self._compute.compile(gm)))
        for of, variant in self._lowered:
            if of is direction:
                self._bind(bound, of, variant)
        if direction is Direction.BACKWARD:
            return as_boxed(bound.backward)
        return as_boxed(partial(bound.forward, direction))

    def _set_apart(self, title: str, gm: GraphModule) -> GraphModule:
        return watched("set_apart", {title: gm}, lambda: {title: set_apart(gm)}, self._stages)[
            title
        ]

    def _bind(self, bound: CompiledPlan, direction: Direction, variant: Variant) -> None:
        lowered = self._lowered[direction, variant]
        names = [str(n.target) for n in lowered.graph.find_nodes(op="call_module")]
        segments = {name: self._compute.compile(getattr(lowered, name)) for name in names}
        buckets = {b.id: b for b in bound.plan.buckets}
        model = bound.living_model()
        compile_codecs(lowered, buckets, model.codecs, self._compute, model.device.torch)
        bound.programs[direction, variant] = Program(lowered, segments, buckets)
        bound.reads[direction, variant] = _read_inputs(lowered)


def _reading(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Make the function of a graph that gathers nothing, but may read home shards, bring those back first."""

    def call(args: list[Any]) -> Any:
        bring_back_inputs(args)
        return function(args)

    return call


def _read_inputs(lowered: GraphModule) -> tuple[int, ...]:
    """The inputs that a graph uses in other ways than to return them."""
    inputs = lowered.graph.find_nodes(op="placeholder")
    return tuple(i for i, n in enumerate(inputs) if any(u.op != "output" for u in n.users))


def _shard_places(gm: GraphModule) -> dict[str, int]:
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


def _fake_mode(gm: GraphModule) -> FakeTensorMode:
    mode: FakeTensorMode | None = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
    assert mode is not None, "graphs are traced with fake tensors"
    return mode


def _device_type(example_inputs: Sequence[Any]) -> str:
    tensors = [v for v in example_inputs if isinstance(v, Tensor)]
    return next((t.device.type for t in tensors if t.device.type != "cpu"), "cpu")


def _model_of(gm: GraphModule) -> ShardedModel | None:
    """The sharded model whose parameters a graph reads, if any."""
    nodes = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    owners = list({id(o): o for o in (registry.owner_of(str(n.args[1])) for n in nodes)}.values())
    if len(owners) > 1:
        raise FcdpError(
            "one compiled graph reads parameters of two sharded models; compile each model on its own"
        )
    if not owners:
        return None
    assert isinstance(owners[0], ShardedModel)
    return owners[0]


def _scales_of(model: ShardedModel) -> Iterator[Tensor]:
    """The whole tensors of quantised weights, which nobody changes between a forward and its backward."""
    for record in model.records.values():
        for module, _ in record.owners():
            if isinstance(module, QuantisedWeight):
                yield from module.buffers()


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
