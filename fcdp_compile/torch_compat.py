"""Every private name of torch that fcdp uses, in one place.  docs/versions.md says on which it was tried."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.fx_passes.joint_graph import joint_graph_passes as inductor_joint_graph_passes
from torch._inductor.virtualized import V
from torch._library.fake_class_registry import FakeScriptObject
from torch._logging._internal import trace_structured
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx import Graph, GraphModule, Node
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.graph import _BoxedCodeGen
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy

__all__ = [
    "CheckpointPolicy",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "aot_autograd",
    "as_boxed",
    "at_end_of_backward",
    "backward_number",
    "boxed",
    "compile_with_inductor",
    "cuda_sanitizer",
    "detect_fake_mode",
    "eager_random",
    "every_thread",
    "fx_graph_cache_hits",
    "gloo_context_count",
    "gloo_timeout",
    "graph_break_places",
    "graph_breaks",
    "graph_module",
    "graphs_from_bytes",
    "graphs_to_bytes",
    "has_gradient_hooks",
    "inductor_decompositions",
    "inductor_modes",
    "is_opaque",
    "is_profiling",
    "is_recomputing",
    "joint_graph_passes",
    "make_dynamic",
    "min_cut_rematerialization_partition",
    "name_thread",
    "nccl_timeout",
    "rendezvous_store",
    "saved_output_descriptor",
    "skip_frame",
    "storage_id",
    "storage_uses",
    "takes_plain_tensors",
    "trace_artifact",
    "tracing_mode",
    "tree_leaves",
    "tree_map_only",
    "wanted_placements",
    "why_no_inductor",
    "without_code",
    "without_modes",
    "without_splitting",
    "without_torch_function",
]


def is_opaque(node: Node) -> bool:
    """Whether a node stands for an object that is neither tensor nor number, such as a DeviceMesh."""
    return isinstance(node.meta.get("val"), FakeScriptObject)


def is_recomputing() -> bool:
    """Whether activation checkpointing runs a forward again: in a backward, but recording gradients.

    Hooks of a backward run with gradients off, unless it is itself to be differentiated.
    """
    return torch.is_grad_enabled() and backward_number() != -1


def backward_number() -> int:
    """A number of the backward that runs in this thread, which all its graphs share; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call this once the backward that runs in this thread has given every gradient to its `.grad`.

    What it raises the backward raises.  A backward that fails lets go of it and does not call it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a hook for gradients was registered on a leaf and its handle not removed."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def is_profiling() -> bool:
    """Whether a profiler is recording, so that named ranges are worth their time."""
    # Not torch.autograd._profiler_enabled(), which is false under a profiler that records every thread.
    return torch.autograd.profiler._is_profiler_enabled


def name_thread(name: str) -> None:
    """Give this thread the name that profilers and debuggers show; Python's own stays within Python."""
    torch._C._set_thread_name(name)


def skip_frame(function: Any) -> None:
    """Let Python run the frames of a function, and Dynamo look at what it calls; inlining goes on."""
    skip_code(function.__code__)


def storage_id(tensor: Tensor) -> int:
    """A number that tensors of one storage share, and no others, while it lives; also without memory."""
    return int(tensor.untyped_storage()._cdata)


@functools.cache
def _references_of_nobody() -> int:
    """References to the object of a storage that nobody holds but whoever asks (3 in torch 2.11 to 2.15)."""
    tensor = torch.empty(1, device="cpu")
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


def storage_uses(tensor: Tensor) -> int:
    """How many tensors share a tensor's storage, itself counted, and who else holds the storage's object."""
    storage = tensor.untyped_storage()  # counts as one more
    held = sys.getrefcount(storage) - _references_of_nobody()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1 + held


@contextmanager
def without_modes() -> Iterator[None]:
    """Run tensor operations for real and unseen: no tracing, gradients or inference mode."""
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def without_torch_function() -> AbstractContextManager[None]:
    """Call torch's functions themselves, past the `__torch_function__` of tensor subclasses."""
    entered: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return entered


def every_thread() -> _ExperimentalConfig:
    """The `experimental_config` with which a profiler also records threads that are older than it."""
    return _ExperimentalConfig(profile_all_threads=True)


class Sanitizer(NamedTuple):
    """torch's CUDA sanitizer: a mode, and what it raises where kernels of two streams race."""

    mode: DispatchMode
    error: type[Exception]


def cuda_sanitizer() -> Sanitizer:
    """Make the sanitizer, which from then on is told of every event and allocation; tried on torch 2.13."""
    # Not imported with this file: importing it makes torch report everything.
    module: Any = importlib.import_module("torch.cuda._sanitizer")
    return Sanitizer(module.CUDASanitizerDispatchMode(), module.CUDASanitizerErrors)


def eager_random() -> AbstractContextManager[None]:
    """Let what Inductor compiles within draw random numbers as eager kernels do."""
    patched: AbstractContextManager[None] = inductor_config.patch(fallback_random=True)
    return patched


def saved_output_descriptor(index: int) -> SavedForBackwardsAOTOutput:
    """What AOTAutograd wants to know of the forward's output that is saved as number `index`."""
    return SavedForBackwardsAOTOutput(index)


def calls_dispatch_of_subclasses() -> bool:
    """Whether torch calls `__torch_dispatch__` of classes derived from DTensor, as it does from 2.12 on."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def gloo_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group's Gloo collectives wait for their peers; None if it has none."""
    return _timeout(_backend(group, "cpu", "gloo"))


def nccl_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group's NCCL collectives may take; None if it has none."""
    return _timeout(_backend(group, "cuda", "nccl"))


def _timeout(backend: Any) -> timedelta | None:
    found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return found


def gloo_context_count(group: dist.ProcessGroup) -> int:
    """How many sets of connections a group has: one for each network interface that Gloo uses; 0 without."""
    backend = _backend(group, "cpu", "gloo")
    return 0 if backend is None else len(getattr(backend.options, "_devices", "1"))


def _backend(group: dist.ProcessGroup, device: str, name: str) -> Any:
    """What runs a group's collectives on a device, if that is the backend of this name, else None.

    Works for a group that was taken down, too.
    """
    try:
        backend: Any
        if hasattr(dist, "get_backend_impl"):  # since torch 2.14
            backend = dist.get_backend_impl(group, torch.device(device))
        else:
            backend = group._get_backend(torch.device(device))
    except RuntimeError:  # nothing runs them
        return None
    return backend if backend.name() == name else None


@contextmanager
def without_splitting(default: dist.ProcessGroup) -> Iterator[None]:
    """Let groups that are made within connect when they are first used, and not be split off the default one.

    torch (2.11 to 2.15) splits them off where the default group is bound to a device, if that supports it.
    """
    bound: Any = default
    device, bound.bound_device_id = bound.bound_device_id, None
    try:
        yield
    finally:
        bound.bound_device_id = device


def rendezvous_store() -> Any:
    """The store by which the ranks of a job have found each other, over a connection of its own."""
    store: Any = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def takes_plain_tensors() -> bool:
    """Whether DTensor takes plain tensors for whole ones (`torch…experimental.implicit_replication`)."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def wanted_placements(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[DTensor, tuple[Placement, ...]]]:
    """The arguments that DTensor will redistribute before it runs an op, and to which placements."""
    dispatcher = DTensor._op_dispatcher
    call = dispatcher.unwrap_to_op_info(op, tuple(args), dict(kwargs))
    assert call.schema is not None, op
    try:
        sharding: Any = dispatcher.sharding_propagator.propagate_op_sharding(call.schema)
    except (NotImplementedError, RuntimeError):
        return []  # DTensor has another way for this op, or will say why it has none
    if not sharding.needs_redistribute or sharding.redistribute_schema is None:
        return []
    given, wanted = args, sharding.redistribute_schema.args_schema
    if call.args_tree_spec is not None:
        given, wanted = tree_leaves(given), tuple(tree_leaves(wanted))
    return [
        (tensor, spec.placements)
        for tensor, spec in zip(given, wanted, strict=False)
        if isinstance(tensor, DTensor)
        and isinstance(spec, DTensorSpec)
        and tensor.placements != spec.placements
    ]


def graph_module(root: nn.Module, graph: Graph, name: str = "GraphModule") -> GraphModule:
    """A GraphModule that generates its Python code when it is first called or printed, if ever."""
    return _LazyGraphModule(root, graph, name)


def without_code() -> AbstractContextManager[None]:
    """Make torch's own passes put off generating Python code in the same way."""
    return _use_lazy_graph_module(True)


def as_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that a function takes its arguments as a list and empties it."""

    def call(args: list[Any]) -> Any:
        return function(args)

    marked: Any = call
    marked._boxed_call = True
    return call


def boxed(gm: GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as a function that takes its arguments as a list and empties it."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    _LazyGraphModule.force_recompile(
        gm
    )  # one that has not is recompiled by its first call, and called twice
    return gm.forward


def inductor_decompositions() -> dict[Any, Any]:
    """The decompositions that Inductor's lowerings rely on."""
    return dict(select_decomp_table())


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace (TORCH_TRACE, for tlparse); made only if there is one."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )


def graph_breaks() -> dict[str, int]:
    """The first line of each reason for which Dynamo broke a graph in this process, and how often."""
    found: dict[str, int] = {}
    for reason, count in counters["graph_break"].items():
        first = str(reason).strip().splitlines()[0]
        found[first] = found.get(first, 0) + int(count)
    return found


def graph_break_places() -> list[str]:
    """Where Dynamo lately broke graphs in this process: "FILE:LINE", in the order of compiling.

    Torch remembers its last 64 compilations.  A break within a call that was being inlined is also one in the
    line that calls.
    """
    places: dict[str, None] = {}
    for frame in get_compilation_metrics():
        if (resumed := _RESUMED.fullmatch(frame.co_name or "")) is not None:
            places[f"{frame.co_filename}:{resumed[1]}"] = None
        if frame.fail_user_frame_filename is not None:
            places[f"{frame.fail_user_frame_filename}:{frame.fail_user_frame_lineno}"] = None
    return list(places)


_RESUMED = re.compile(r"torch_dynamo_resume_in_.+_at_(\d+)")
"""How Dynamo names what it goes on with after a break, by the function and the line."""


def graphs_to_bytes(graphs: Sequence[GraphModule]) -> bytes:
    """Traced graphs with their fake values, symbolic sizes and shared storages among them."""
    for gm in graphs:
        for node in gm.graph.nodes:  # the rest of it need not be picklable
            node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    data: bytes = GraphPickler.dumps(tuple(graphs), PicklerOptions(ops_filter=None))
    return data


def graphs_from_bytes(data: bytes) -> tuple[GraphModule, ...]:
    """What `graphs_to_bytes` was given, in a fake mode of its own; runs code, so only for what one wrote."""
    loaded: Any = GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    return tuple(loaded)


def make_dynamic(tensor: Tensor, dim: int) -> None:
    """Let Dynamo trace a size of an input as a symbol, if what is traced works with any."""
    maybe_mark_dynamic(tensor, dim)


def tracing_mode() -> FakeTensorMode:
    """A fake mode for models that are traced without memory, sizes becoming symbols as under Dynamo.

    Modules made in it can be moved and cast.  Asking for a value that there is none of raises, also where
    torch would go on with a symbol that nobody can know: an `item()`, a size that depends on values.
    """
    mode = FakeTensorMode(
        shape_env=ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    )
    mode.fake_tensor_converter = _Forgetful()
    return mode


class _Forgetful(FakeTensorConverter):
    """Keeps no weak references to what it makes.

    torch 2.13 refuses `Module.to` for fake parameters that somebody has one to, and its own converter does
    to all whose shape it sees for the first time.
    """

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        pass

    def from_real_tensor(self, *args: Any, **more: Any) -> FakeTensor:
        made = super().from_real_tensor(*args, **more)
        self.tensor_memo.clear()
        return made

    def add_constant_storage_mapping(self, fake_tensor: FakeTensor) -> None:
        super().add_constant_storage_mapping(fake_tensor)
        kept: list[list[Any]] = list(self.constant_storage_mapping.values())
        for references in kept:
            references[:] = [
                r if isinstance(r, _Reference) else _Reference(r()) for r in references
            ]


class _Reference:
    """Refers to a scalar for as long as the mode lives."""

    def __init__(self, value: FakeTensor | None) -> None:
        self._value = value

    def __call__(self) -> FakeTensor | None:
        return self._value


def fx_graph_cache_hits() -> int:
    """How many graphs this process took from Inductor's cache instead of compiling them."""
    return int(counters["inductor"]["fxgraph_cache_hit"])


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Inductor's settings for each mode that `torch.compile` knows, by name."""
    modes: dict[str, dict[str, Any]] = list_mode_options()
    return modes


def why_no_inductor(device_type: str) -> str | None:
    """What Inductor lacks to compile for a device, None if nothing."""
    if device_type != "cpu":
        return None if has_triton() else "Triton is not installed"
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:
        return str(error)
    return None


def joint_graph_passes(joint: GraphModule, settings: Mapping[str, Any]) -> GraphModule:
    """Inductor's passes over a joint graph: patterns such as attention, and its own random numbers."""
    with inductor_config.patch(dict(settings)), V.set_fake_mode(_fake_mode_of(joint)):
        inductor_joint_graph_passes(joint)
    # The number of a seed is a constant of Inductor's own op, with which no two layers would be equal; as a
    # view a seed can be taken outside of the segment that uses it.
    lookup = torch.ops.prims.inductor_lookup_seed.default
    for node in joint.graph.find_nodes(op="call_function", target=lookup):
        node.target = torch.ops.aten.select.int
        node.args = (node.args[0], 0, node.args[1])
    return joint


def compile_with_inductor(
    gm: GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[[list[Any]], Any]:
    """Compile an ATen graph of fake inputs; its outputs must be a tuple."""
    # Inductor may choose other strides for results that it takes to be nobody's; another segment was traced
    # with, and checks for, these.
    output = gm.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple), results
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    # In the tracing context of the whole graph a segment would report its output strides as the graph's; in
    # none at all Inductor's cache of compiled graphs misses the shapes it guards on, and is not used.
    mode = _fake_mode_of(gm)
    patched = inductor_config.patch(dict(settings))
    with patched, tracing(TracingContext(mode)), V.set_fake_mode(mode):
        compiled: Callable[[list[Any]], Any] = compile_fx_inner(gm, list(inputs))
    return compiled


def _fake_mode_of(gm: GraphModule) -> FakeTensorMode:
    """The mode of a graph's values; a new one for a graph without tensors."""
    values = [n.meta.get("val") for n in gm.graph.nodes]
    return detect_fake_mode(values) or FakeTensorMode()
