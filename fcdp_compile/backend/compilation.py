"""`torch.compile(model, backend="fcdp")`: the pipeline from a Dynamo graph to a bound program.

    Dynamo graph -> AOTAutograd's joint graph -> partition -> bucket -> stamp
                 -> lowering -> placement -> plan -> programs

Only this module and `bound_graphs` know both the passes and the runtime.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import SymInt, Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from fcdp_compile.backend.bound_graphs import BoundGraphs, shard_places
from fcdp_compile.backend.compute import Compute, inductor_settings
from fcdp_compile.backend.options import Options
from fcdp_compile.backend.writes import refuse_writes
from fcdp_compile.core.params import registry
from fcdp_compile.core.params.home_shard import bring_back_inputs
from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.mesh import process_count
from fcdp_compile.core.params.spec import may_leave
from fcdp_compile.core.sharding.layers import COMPILES_LAYERS
from fcdp_compile.core.sharding.refusals import is_ignored
from fcdp_compile.errors import FcdpError, UnshardedParameterError
from fcdp_compile.models.quantised.weight import QuantisedWeight
from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.graph.inline import clone, fake_mode
from fcdp_compile.passes.graph.runner import Stages, watched
from fcdp_compile.passes.narrow import narrow
from fcdp_compile.passes.partition import mark_constant, partition
from fcdp_compile.passes.planning.alike import renamed
from fcdp_compile.passes.set_apart import set_apart
from fcdp_compile.plan import Direction
from fcdp_compile.runtime.alike import AlikePlans
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.progress import CompileProgress
from fcdp_compile.runtime.run import CompiledPlan
from fcdp_compile.torch_compat import aot_autograd, min_cut_rematerialization_partition
from fcdp_compile.torch_compat.compilers import guard_empty_hooks
from fcdp_compile.torch_compat.graphs import as_boxed, unwritten_inputs, without_code

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
    guard_empty_hooks()
    settings = inductor_settings(mode)
    checked = Options.parse({**(options or {}), **more})
    if not _gathers(gm) and any(isinstance(value, HomeTensor) for value in example_inputs):
        # Code of the training loop beside a graph break.  Compiled, its results would be plain DTensors,
        # which do not become whole where they meet plain tensors (`core/params/derived.py`).
        return gm
    _refuse_unsharded(gm, example_inputs)
    refuse_writes(gm)
    if settings:  # a mode needs Inductor, even if ATen's kernels are the default
        checked = replace(checked, compute=checked.compute or "inductor")
    return _Compilation(checked, example_inputs, settings).compile(gm, example_inputs)


setattr(fcdp, COMPILES_LAYERS, True)


def _gathers(gm: GraphModule) -> bool:
    """Whether a graph, or a part of it such as a checkpointed function, gathers a parameter."""
    graphs = (m.graph for m in gm.modules() if isinstance(m, GraphModule))
    return any(graph.find_nodes(op="call_function", target=UNSHARD) for graph in graphs)


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
        self._first: tuple[BoundGraphs, CompiledPlan] | None = None
        self._plans: AlikePlans | None = None
        self._stages: Stages | None = None if options.dump is None else []
        self._progress: CompileProgress | None = None  # that of the model, once it is known

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiler = aot_autograd(
            fw_compiler=partial(self._compile, Direction.FORWARD),
            bw_compiler=partial(self._compile, Direction.BACKWARD),
            inference_compiler=partial(self._compile, Direction.INFERENCE),
            partition_fn=self._partition,
            decompositions=self._compute.decompositions(),
            keep_inference_input_mutations=True,
        )
        try:
            with without_code():
                compiled: Callable[..., Any] = compiler(gm, example_inputs)
        except RecursionError as error:
            if not any(isinstance(value, SymInt) for value in example_inputs):
                raise
            raise FcdpError(
                "torch cannot trace this model with sizes that vary, such as linear layers of DTensors "
                "(parallelize_module); pad batches to one length and call torch.compile with dynamic=False, "
                "or cut the model with fcdp_compile.tensor_parallel"
            ) from error
        finally:
            if self._progress is not None:
                self._progress.end()
        return compiled

    # --- planning: no communication, nothing runs ---------------------------------------------------------

    def _partition(
        self, joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        joint = self._prepare("joint", joint)
        if (model := _model_of(joint)) is not None:
            self._progress = model.progress
            model.progress.plans()
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
        graphs: Mapping[Direction, GraphModule],
        *,
        num_fwd_outputs: int = 0,
    ) -> None:
        """Plan the graphs for the parameters that they were traced with; alike parameters may follow."""
        unplanned = {d: clone(gm) for d, gm in graphs.items()}
        planned = self._unbound(self._stages)
        self._progress = model.progress
        first = planned.plan(model, graphs, num_fwd_outputs=num_fwd_outputs)
        self._first = planned, first

        def plan_others(keys: Mapping[str, str]) -> CompiledPlan:
            graphs = self._unbound(None if self._stages is None else [])
            model = first.living_model()
            if (bound := graphs.plan_like(planned, model, keys)) is None:
                alike = {d: renamed(gm, keys) for d, gm in unplanned.items()}
                with fake_mode(next(iter(alike.values()))):  # as within AOTAutograd
                    bound = graphs.plan(model, alike, num_fwd_outputs=num_fwd_outputs)
            for direction in unplanned:
                graphs.bind(bound, direction)
            return bound

        places = {d: shard_places(gm) for d, gm in unplanned.items()}
        self._plans = AlikePlans(first, places, plan_others)

    def _unbound(self, stages: Stages | None) -> BoundGraphs:
        return BoundGraphs(self._options, self._machine, self._compute, stages)

    # --- compiling ----------------------------------------------------------------------------------------

    def _compile(self, direction: Direction, gm: GraphModule, inputs: Any) -> Callable[..., Any]:
        if direction is Direction.INFERENCE:
            self._prepare(direction.value, gm)
        model = _model_of(gm)
        if model is not None and direction is Direction.INFERENCE:
            self._plan(model, {direction: gm})
        if self._plans is None or self._first is None:
            return as_boxed(_reading(self._compute.compile(gm)))
        planned, first = self._first
        planned.bind(first, direction)
        if direction is Direction.BACKWARD:
            return as_boxed(self._plans.backward)
        return as_boxed(partial(self._plans.forward, direction))

    def _prepare(self, title: str, gm: GraphModule) -> GraphModule:
        apart = watched("set_apart", {title: gm}, lambda: {title: set_apart(gm)}, self._stages)
        but = _leaving(_model_of(gm))
        low = watched("narrow", apart, lambda: {title: narrow(apart[title], but)}, self._stages)
        return low[title]


def _reading(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Make the function of a graph that gathers nothing, but may read home shards, bring those back first."""

    def call(args: list[Any]) -> Any:
        bring_back_inputs(args)
        return function(args)

    return call


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


def _leaving(model: ShardedModel | None) -> set[str]:
    """The parameters that are copied to the host only to let their home shards leave the device."""
    if model is None:
        return set()
    frozen = model.records.frozen()
    return {
        key
        for key, record in model.records.items()
        if record.spec.layout.nodes == 1 and may_leave(record.spec, is_frozen=key in frozen)
    }


def _scales_of(model: ShardedModel) -> Iterator[Tensor]:
    """The whole tensors of quantised weights, which nobody changes between a forward and its backward."""
    for record in model.records.values():
        for module, _ in record.owners():
            if isinstance(module, QuantisedWeight):
                yield from module.buffers()
