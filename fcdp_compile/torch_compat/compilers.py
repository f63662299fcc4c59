"""Dynamo and Inductor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._dynamo import graph_break as _break_graph
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo import skip_frame as _run_in_python
from torch._dynamo.eval_frame import innermost_backend, skip_code
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, graph_break_reasons
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.fx_passes.joint_graph import joint_graph_passes as inductor_joint_graph_passes
from torch._inductor.virtualized import V
from torch._logging._internal import trace_structured
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._triton import has_triton

F = TypeVar("F", bound=Callable[..., Any])


def skip_frame(function: Any) -> None:
    """Make Dynamo skip a function's frames, but not those of the functions it calls; it may still inline."""
    skip_code(function.__code__)


def skip_frames_below(function: F) -> F:
    """Make Dynamo skip a function's frames, and those of all functions that it calls; it may still inline."""
    code: CodeType = function.__code__
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


skip_this_frame = _run_in_python
"""Where Dynamo traces a call of it, Python runs the frame that Dynamo began with, and all later frames of
that code.  Dynamo then looks at the frames of the functions that it calls."""


break_graph = _break_graph
"""Where Dynamo traces a call of it with `msg=OWN_BREAK`, it compiles what the frame that it began with does
before and after the call within which it is; Python runs this call, and Dynamo looks at its frames."""

OWN_BREAK = "fcdp compiles equal layers by themselves"


def may_skip_frame() -> bool:
    """Whether the frame that Dynamo traces now can be run by Python instead.

    Not with `fullgraph=True`, nor while Dynamo traces a region of the graph, such as a checkpointed function.
    """
    tx = InstructionTranslator.current_tx()
    return not tx.one_graph and tx.output.current_tracer.parent is None


def tracing_backend() -> Any:
    """The backend that Dynamo traces for now, as it was given to torch.compile or registered."""
    given: Any = InstructionTranslator.current_tx().output.compiler_fn
    backend = innermost_backend(given)
    return getattr(backend, "compiler_fn", backend)  # of torch.compile's own wrapper


def guard_empty_hooks() -> None:
    """Let Dynamo trace the frame anew once a module that it calls, and that has no hooks now, has hooks.

    A backend calls it.  Dynamo notes such a guard for every module without hooks, and leaves the guard out
    when it builds the others, unless `torch._dynamo.config.skip_nnmodule_hook_guards` is off.
    """
    if (context := TracingContext.try_get()) is None:
        return
    guards = context.guards_context.dynamo_guards
    for guard in list(guards):
        if guard.create_fn_name() == GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT.__name__:
            guards.add(guard.originating_source.make_guard(GuardBuilder.SEQUENCE_LENGTH))


def own_recompiles(limit: int) -> dict[str, Any]:
    """Arguments of torch.compile that let a call recompile `limit` times, whatever other calls compile.

    Models may share code, such as a library's patched forward, and Dynamo else counts by code object.  None
    where torch has no such arguments (2.11).
    """
    given = {"recompile_limit": limit, "isolate_recompiles": True}
    return given if given.keys() <= inspect.signature(torch.compile).parameters.keys() else {}


def make_dynamic(tensor: Tensor, dim: int) -> None:
    """Let Dynamo trace a size of an input as a symbol, if the traced code works with any size."""
    maybe_mark_dynamic(tensor, dim)


def graph_breaks() -> dict[str, int]:
    """The first line of each reason for which Dynamo broke a graph in this process, and how often.

    Where fcdp asks for it (`skip_this_frame`, `break_graph`) is no break.
    """
    found: dict[str, int] = {}
    for reason, count in counters["graph_break"].items():
        if _is_own_break(str(reason)):
            continue
        first = str(reason).strip().splitlines()[0]
        found[first] = found.get(first, 0) + int(count)
    return found


def graph_break_places() -> list[str]:
    """Where Dynamo broke graphs in this process, since its last reset: "FILE:LINE", in order."""
    reasons = [r for r in graph_break_reasons if r.user_stack and not _is_own_break(r.reason)]
    stacks = [reason.user_stack for reason in reasons]
    return list(dict.fromkeys(f"{stack[-1].filename}:{stack[-1].lineno}" for stack in stacks))


def _is_own_break(reason: str) -> bool:
    return OWN_BREAK in reason or "Call to `torch._dynamo.skip_frame()`" in reason


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to torch's structured trace (TORCH_TRACE, for tlparse); made only if there is a trace."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )


def is_tracing() -> bool:
    """Whether torch is compiling in this thread, from Dynamo to the last backend."""
    return TracingContext.try_get() is not None


def eager_random() -> AbstractContextManager[None]:
    """Make code that Inductor compiles in this block draw random numbers as eager kernels do."""
    patched: AbstractContextManager[None] = inductor_config.patch(fallback_random=True)
    return patched


def inductor_decompositions() -> dict[Any, Any]:
    """The decompositions that Inductor's lowerings rely on."""
    return dict(select_decomp_table())


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Inductor's settings for each mode that `torch.compile` knows, by name."""
    modes: dict[str, dict[str, Any]] = list_mode_options()
    return modes


def why_no_inductor(device_type: str) -> str | None:
    """The reason why Inductor cannot compile for a device; None if it can."""
    if device_type != "cpu":
        return None if has_triton() else "Triton is not installed"
    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError) as error:
        return str(error)
    return None


def joint_graph_passes(joint: GraphModule, settings: Mapping[str, Any]) -> GraphModule:
    """Run Inductor's passes over a joint graph: patterns such as attention, and its own random numbers."""
    # To decide whether to pad a matrix product, Inductor measures it: ranks would get different graphs.
    with (
        inductor_config.patch({**settings, "shape_padding": False}),
        V.set_fake_mode(_fake_mode_of(joint)),
    ):
        inductor_joint_graph_passes(joint)
    # Inductor's own op has the seed's number as a constant, so no two layers would be equal.  A seed that is
    # a view can be taken outside of the segment that uses it.
    lookup = torch.ops.prims.inductor_lookup_seed.default
    for node in joint.graph.find_nodes(op="call_function", target=lookup):
        node.target = torch.ops.aten.select.int
        node.args = (node.args[0], 0, node.args[1])
    return joint


_FOR_GPUS = {"unroll_reductions_threshold": 1}
"""Inductor's settings for segments that it compiles with Triton.

An unrolled sum over a few elements that reads a parameter from a gathered buffer, such as the weights of 7
labels on 4 ranks, becomes Triton code that does not compile: "ModularIndexing is not defined" (torch 2.11
and 2.13).
"""


def compile_with_inductor(
    gm: GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[[list[Any]], Any]:
    """Compile an ATen graph of fake inputs; its outputs must be a tuple."""
    # Inductor may change the strides of results that it believes no user sees; the segment that uses a result
    # was traced with the original strides and checks them.
    output = gm.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple), results
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    # In the tracing context of the whole graph, a segment would report its output strides as the graph's.
    # Without a context, Inductor's cache of compiled graphs is not used, as it lacks the shapes it guards on.
    mode = _fake_mode_of(gm)
    is_for_gpu = any(isinstance(x, Tensor) and x.device.type != "cpu" for x in inputs)
    patched = inductor_config.patch({**(_FOR_GPUS if is_for_gpu else {}), **settings})
    with patched, tracing(TracingContext(mode)), V.set_fake_mode(mode):
        compiled: Callable[[list[Any]], Any] = compile_fx_inner(gm, list(inputs))
    return compiled


def _fake_mode_of(gm: GraphModule) -> FakeTensorMode:
    """The fake mode of a graph's values; a new mode for a graph without tensors."""
    values = [n.meta.get("val") for n in gm.graph.nodes]
    return detect_fake_mode(values) or FakeTensorMode()
