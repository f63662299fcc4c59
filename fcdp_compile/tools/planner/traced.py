"""A model's training step as graphs that belong to no mesh yet, from fake tensors.

    build() -> model, inputs -> shard on one rank -> Dynamo -> AOTAutograd -> partition -> TracedModel

On one rank no parameter is cut, but all are read through `unshard`.  A strategy and a mesh then change only
the sizes of home shards, which `estimate` sets.  The batch stays a symbol.  Equal layers that share a trace
in training do so here (`core.sharding.layers`).
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from fcdp_compile.backend.bound_graphs import shard_places
from fcdp_compile.backend.compute import Compute
from fcdp_compile.core.params.mesh import make_mesh, topology_of
from fcdp_compile.core.ranks.inner_mesh import data_mesh
from fcdp_compile.core.sharding.layers import COMPILES_LAYERS
from fcdp_compile.core.sharding.shard import matrices_of, shard, state_of
from fcdp_compile.errors import FcdpError
from fcdp_compile.models.parallel.context import context_parallel
from fcdp_compile.models.parallel.tensor import tensor_parallel
from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.memory.curve import hints_of
from fcdp_compile.passes.narrow import narrow
from fcdp_compile.passes.partition import partition
from fcdp_compile.passes.set_apart import set_apart
from fcdp_compile.plan import Direction
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.torch_compat import aot_autograd, min_cut_rematerialization_partition
from fcdp_compile.torch_compat.compilers import make_dynamic
from fcdp_compile.torch_compat.distributed import start_fake_group
from fcdp_compile.torch_compat.graphs import as_boxed, boxed, tracing_mode, without_code

Inputs = Mapping[str, Tensor] | Sequence[Tensor]
Build = Callable[[int, int], tuple[nn.Module, Inputs]]
"""A function of batch and sequence length that returns a model and the inputs of its forward."""

TRACED_BATCH = 7
"""Samples in the trace: 0 and 1 would become constants, and few other sizes are 7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedParam:
    """A parameter, before a strategy and a mesh are chosen; is_packed: as in `ParamSpec`.

    is_matrix: whether it may have a home node (`core.sharding.shard`).  shape: of one rank's part, if ranks
    of a node share parameters; kept_dim: as in `InnerCut`.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gather_dtype: torch.dtype
    requires_grad: bool
    is_packed: bool
    is_matrix: bool
    kept_dim: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedGraph:
    """One Dynamo graph: a forward and its backward, or an inference graph if nothing in it is trained.

    outputs: how many of the forward's results go to the caller; the rest is saved for backward.
    """

    graphs: Mapping[Direction, GraphModule]
    outputs: int

    @property
    def first(self) -> GraphModule:
        """The graph that runs in the forward."""
        return next(iter(self.graphs.values()))

    def sizes(self, batch: int) -> dict[sympy.Symbol, int]:
        """Return the values of the symbols for a batch size; other graphs may use them for other sizes.

        A graph after a break has a symbol of its own for the batch, or for a multiple of it, such as the
        number of tokens; other symbols, such as the size of a generator's state, keep their values.
        """
        hints = {s: value for gm in self.graphs.values() for s, value in hints_of(gm).items()}
        return {s: _with_batch(value, batch) for s, value in hints.items()}

    def may_insist(self, batch: int) -> bool:
        """Whether an input other than a parameter has a size that may depend on this batch size."""
        inputs = self.first.graph.find_nodes(op="placeholder")
        shapes = [
            n.meta["val"].shape
            for n in inputs
            if isinstance(n.meta.get("val"), Tensor)
            and any(u.target is not UNSHARD for u in n.users)
        ]
        return any(d > 0 and d % batch == 0 for s in shapes for d in s if isinstance(d, int))


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """A call of a graph in the forward.

    graph: its place among the model's graphs.  keys: of the parameters that the call is for, by the keys that
    the graph was traced with.
    """

    graph: int
    keys: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """The data that planning needs of a model.

    graphs: several if the model breaks its graph, or has equal layers that share a trace.
    calls: in the order of the forward.
    batch: the number of samples in the trace.
    inner_ranks: how many ranks each group has in which the model itself communicates, by name of the group.
    """

    params: tuple[TracedParam, ...]
    graphs: tuple[TracedGraph, ...]
    calls: tuple[TracedCall, ...]
    batch: int
    inner_ranks: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_any_batch(self) -> bool:
        """Whether the batch size stayed a symbol, so that the model accepts any batch size.

        Every graph must either have the symbol or have no size that may depend on the batch.  After operators
        that ran outside of all graphs the batch is a number.
        """
        fixed = [g for g in self.graphs if g.sizes(0) == g.sizes(1)]
        return len(fixed) < len(self.graphs) and not any(g.may_insist(self.batch) for g in fixed)

    @property
    def unread(self) -> tuple[str, ...]:
        """The names of parameters that no graph reads; code that reads them is not in the plan."""
        read = {key for call in self.calls for key in call.keys.values()}
        return tuple(p.name for p in self.params if p.key not in read)


def _with_batch(value: int, batch: int) -> int:
    per_sample, rest = divmod(value, TRACED_BATCH)
    return value if rest else per_sample * batch


def trace(
    build: Build,
    *,
    seq: int,
    param_dtype: torch.dtype | None,
    cp: int = 1,
    tp: int = 1,
    note: Callable[[str], None] = lambda what: None,
) -> TracedModel:
    """Trace the training step of a model.

    cp, tp: how many ranks share each sequence and each parameter, for models of Transformers.
    note: called with each stage that begins.

    Clears everything that torch.compile has compiled and learnt in this process (`torch.compiler.reset`),
    before and after, so the next call of a compiled model compiles it again: call it in a process that does
    not train.  No narrower reset works.  `torch.compile(isolate_recompiles=True)` keeps cache entries apart,
    but not the shapes that Dynamo has learnt, which would turn sizes that the plan needs into symbols; and it
    leaves entries on libraries' code that keep this trace alive.

    Raises: FcdpError for a model that cannot be traced without data, or that gives no loss to train with.
    """
    with inner_mesh(cp, tp) as mesh, tracing_mode():
        note("building the model without weights")
        model, inputs = _built(build, seq)
        _check_inputs(model, inputs)
        if mesh is not None:
            tensor_parallel(model, mesh)
            context_parallel(model, mesh)
            inputs = first_part(inputs, cp)
        shard(model, mesh, param_dtype=param_dtype, strategy="fcdp" if mesh is None else "zero3")
        found = _graphs_of(model, inputs, note)
    trained = [n for n, g in enumerate(found.graphs) if Direction.BACKWARD in g.graphs]
    if not any(call.keys for call in found.calls if call.graph in trained):
        raise FcdpError(
            "no graph of the model's training step reads a parameter; its forward must run under "
            "torch.compile and return a loss that needs gradients (for Hugging Face models, pass labels)"
        )
    return TracedModel(
        params=_params_of(model),
        graphs=tuple(found.graphs),
        calls=tuple(found.calls),
        batch=_batch_of(inputs),
        inner_ranks=state_of(model).topology.inner_ranks,
    )


def _params_of(model: nn.Module) -> tuple[TracedParam, ...]:
    records = state_of(model).records.values()
    matrices = set(matrices_of(model, [r.parameter() for r in records]))
    return tuple(
        TracedParam(
            key=spec.key,
            name=spec.name,
            shape=spec.layout.shape,
            dtype=spec.home_dtype,
            gather_dtype=spec.gather_dtype,
            requires_grad=record.parameter().requires_grad,
            is_packed=spec.is_packed,
            is_matrix=record.parameter() in matrices,
            kept_dim=None if spec.inner is None else spec.inner.kept_dim,
        )
        for record in records
        for spec in [record.spec]
    )


def _batch_of(inputs: Inputs) -> int:
    """Return the samples in the trace: as many as were requested, unless the inputs fix another number."""
    args, kwargs = _arguments(inputs)
    shapes = [v.shape for v in [*args, *kwargs.values()] if isinstance(v, Tensor) and v.ndim]
    was_asked = not shapes or any(TRACED_BATCH in shape for shape in shapes)
    return TRACED_BATCH if was_asked else int(shapes[0][0])


def _built(build: Build, seq: int) -> tuple[nn.Module, Inputs]:
    try:
        return build(TRACED_BATCH, seq)
    except FcdpError:
        raise
    except Exception as error:  # a model's code may raise anything
        raise FcdpError(
            f"the model cannot be built without weights and data ({first_line(error)})"
        ) from error


def _check_inputs(model: nn.Module, inputs: Inputs) -> None:
    """Refuse inputs that do not match the forward's signature."""
    if not isinstance(model, nn.Module):
        raise FcdpError(
            f"the build function returned {type(model).__name__} instead of a model; return a pair of "
            "an nn.Module and the inputs of its forward"
        )
    if not isinstance(inputs, Mapping | Sequence):
        raise FcdpError(
            f"the build function returned {type(inputs).__name__} instead of inputs; return a mapping "
            "such as {'input_ids': torch.zeros(batch, seq, dtype=torch.long)}, or a list"
        )
    args, kwargs = _arguments(inputs)
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise FcdpError(
            f"forward of {type(model).__name__} cannot be called with the inputs it was given ({error}); "
            "give --model a function your_module:build_fn of batch and sequence length that returns the "
            "model and a mapping of all its inputs, labels too"
        ) from None


def _arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs), {}


def _graphs_of(model: nn.Module, inputs: Inputs, note: Callable[[str], None]) -> _Capture:
    args, kwargs = _arguments(inputs)
    for value in [*args, *kwargs.values()]:
        if isinstance(value, Tensor) and value.ndim and value.shape[0] == TRACED_BATCH:
            make_dynamic(value, 0)
    found = _Capture(state_of(model), note)
    state_of(model).progress.is_shown = False  # `note` says what the planner does

    # A function, because Lightning Fabric, once imported, makes deep copies of torch.compile's arguments.
    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return found.compile(gm, example_inputs)

    setattr(backend, COMPILES_LAYERS, True)
    torch.compiler.reset()
    model.train()
    note("tracing its forward")
    try:
        with _without_dynamos_warnings():
            torch.compile(model, backend=backend)(*args, **kwargs)
    except FcdpError:
        raise
    except Exception as error:
        # The errors of Dynamo, AOTAutograd and the model's own code have no common class.
        raise FcdpError(_why_untraceable(error)) from error
    finally:
        torch.compiler.reset()
    return found


@contextmanager
def _without_dynamos_warnings() -> Iterator[None]:
    """Hide Dynamo's long warnings of graph breaks, unless TORCH_LOGS asks for more than warnings.

    A break alone does not harm a plan; fcdp reports the breaks that do.
    """
    dynamo = logging.getLogger("torch._dynamo")
    before = dynamo.level
    if dynamo.getEffectiveLevel() >= logging.WARNING:
        dynamo.setLevel(logging.ERROR)
    try:
        yield
    finally:
        dynamo.setLevel(before)


def _why_untraceable(error: Exception) -> str:
    why = f"{first_line(error)}{_place(error)}"
    return (
        f"the model cannot be traced without data ({why}); if it needs an input that it did not "
        "get, give --model a function your_module:build_fn that returns the model and a mapping of all its "
        "inputs; turn off code that depends on values of inputs"
    )


def _place(error: BaseException) -> str:
    """Return where in the model's code an error arose: the last line outside of torch and fcdp, if any."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
    frames = traceback.extract_tb(error.__traceback__)
    found = [frame for frame in frames if not frame.filename.startswith(ours)]
    return f", at {found[-1].filename}:{found[-1].lineno}" if found else ""


def first_line(error: Exception) -> str:
    """The kind of an error, and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])


class _Capture:
    """Keeps the partitioned graphs and their calls, and runs the graphs unchanged.

    note: called with each stage that begins.
    """

    def __init__(self, model: ShardedModel, note: Callable[[str], None]) -> None:
        self.graphs: list[TracedGraph] = []
        self.calls: list[TracedCall] = []
        self._model = model
        self._note = note

    def compile(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._note(f"tracing the backward of graph {len(self.graphs) + 1}")
        compiler = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=_as_it_is,
            inference_compiler=self._inference,
            partition_fn=self._cut,
            decompositions=Compute("eager").decompositions(),
            keep_inference_input_mutations=True,
        )
        with without_code():
            compiled: Callable[..., Any] = compiler(gm, example_inputs)
        return compiled

    def _cut(
        self, joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any
    ) -> tuple[GraphModule, GraphModule]:
        fw, bw = partition(
            narrow(joint),
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            partitioner=min_cut_rematerialization_partition,
            **options,
        )
        halves = {Direction.FORWARD: fw, Direction.BACKWARD: bw}
        self.graphs.append(TracedGraph(graphs=halves, outputs=num_fwd_outputs))
        return fw, bw

    def _inference(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not gm.graph.find_nodes(op="call_function", target=UNSHARD):
            return _as_it_is(gm, example_inputs)
        gm = narrow(set_apart(gm))
        self.graphs.append(TracedGraph(graphs={Direction.INFERENCE: gm}, outputs=0))
        return self._forward(gm, example_inputs)

    def _forward(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        number, places, run = len(self.graphs) - 1, shard_places(gm), _as_it_is(gm, example_inputs)

        def call(args: list[Any]) -> Any:
            shards = [args[place] for place in places.values()]
            found = zip(places, self._model.records.keys_at(shards), strict=True)
            now = TracedCall(graph=number, keys={then: str(key) for then, key in found})
            if now not in self.calls:  # again for the same parameters: a step plans it once
                self.calls.append(now)
            return run(args)

        return as_boxed(call)


def _as_it_is(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    # A copy: code generation changes a graph, and the passes read the graph later.
    return as_boxed(boxed(GraphModule(gm, gm.graph)))


@contextmanager
def inner_mesh(cp: int, tp: int) -> Iterator[DeviceMesh | None]:
    """The first rank's mesh of cp x tp ranks that do not exist; None for one rank.

    Raises: FcdpError in a process that has process groups.
    """
    if cp * tp == 1:
        yield None
        return
    if dist.is_initialized():
        raise FcdpError(
            "cp and tp cannot be planned in a process of a running job; use `fcdp plan`"
        )
    start_fake_group(cp * tp)
    try:
        mesh = make_mesh(1, cp=cp, tp=tp)
        assert mesh is not None, "several ranks have one"
        topology_of(data_mesh(mesh))  # now: it reads tensors, which will be fake
        yield mesh
    finally:
        dist.destroy_process_group()


def first_part(inputs: Inputs, cp: int) -> Mapping[str, Any] | Sequence[Tensor]:
    """The inputs of the first rank of those that share sequences, as `sequence_part` gives them.

    Raises: FcdpError for inputs other than tokens and labels.
    """
    if cp == 1:
        return inputs
    if not isinstance(inputs, Mapping) or set(inputs) != {"input_ids", "labels"}:
        raise FcdpError(
            "sequences can be cut for models whose inputs are input_ids and labels; leave out --cp"
        )
    ids = inputs["input_ids"]
    if ids.shape[1] % cp:
        raise FcdpError(f"--cp {cp} does not divide the {ids.shape[1]} tokens of --seq")
    part = torch.zeros_like(ids[:, : ids.shape[1] // cp])
    return {
        "input_ids": part,
        "labels": part.clone(),
        "shift_labels": part.clone(),
        "position_ids": part.clone(),
        "sequence_ids": None,
        "only_trailing": True,
    }
