"""Compile the compute segments with Inductor, or run them with ATen's kernels."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fcdp_compile.errors import ArgumentError
from fcdp_compile.ops import REQUIRE_GRAD
from fcdp_compile.passes.graph.inline import clone
from fcdp_compile.torch_compat import compilers
from fcdp_compile.torch_compat.autograd import without_modes
from fcdp_compile.torch_compat.graphs import boxed

log = logging.getLogger(__name__)

_MAX_CONSTANT_BYTES = 4096
"""The size up to which constants are compared by value; repeated layers contain no larger ones."""

_CUDA_GRAPHS = "triton.cudagraphs"

BoxedCallable = Callable[[list[Any]], Any]


class Compute:
    """One way of compiling segments; equal segments of one Dynamo graph are compiled once.

    settings: Inductor's settings for a mode of `torch.compile` (`inductor_settings`).
    is_inductor: whether segments are compiled at all.
    """

    def __init__(self, kind: str, settings: Mapping[str, Any] | None = None) -> None:
        self.is_inductor = kind == "inductor"
        # No CUDA graphs, whatever the environment and configuration say: a recorded segment would reuse the
        # addresses of its inputs and outputs, but lanes free and refill these buffers.
        self._settings = {**(settings or {}), _CUDA_GRAPHS: False}
        self._done: dict[str, BoxedCallable] = {}

    @staticmethod
    def available(kind: str, device_type: str) -> str:
        """`kind`, or "eager" with one warning if Inductor cannot compile for the device."""
        if kind != "inductor" or (reason := compilers.why_no_inductor(device_type)) is None:
            return kind
        _warn_once(device_type, reason)
        return "eager"

    def decompositions(self) -> dict[Any, Any]:
        """The decompositions that AOTAutograd should use for this compiler."""
        table = compilers.inductor_decompositions() if self.is_inductor else {}
        return table | {REQUIRE_GRAD: lambda tensor, anchor: tensor}

    def prepare_joint(self, joint: GraphModule) -> GraphModule:
        """Run the compiler's own passes over the joint graph, before it is partitioned."""
        return compilers.joint_graph_passes(joint, self._settings) if self.is_inductor else joint

    def compile(self, gm: GraphModule) -> BoxedCallable:
        """Compile a graph into a function that takes its arguments as a list and empties the list."""
        key = _structure(gm)
        done = self._done.get(key) if key is not None else None
        if done is None:
            done = self._compile(gm)
            if key is not None:
                self._done[key] = done
        return done

    def _compile(self, gm: GraphModule) -> BoxedCallable:
        if not self.is_inductor:
            return boxed(gm)
        # Inductor changes the graph, and a plan of alike parameters compiles it again.
        own = clone(gm)
        inputs = [n.meta["val"] for n in own.graph.find_nodes(op="placeholder")]
        return compilers.compile_with_inductor(own, inputs, self._settings)


def inductor_settings(mode: str | None) -> dict[str, Any]:
    """Inductor's settings for a mode of `torch.compile`.

    Raises: ValueError for an unknown mode and for one that records CUDA graphs: a recorded step replays its
    kernels without the collectives and copies between them.
    """
    modes = compilers.inductor_modes()
    working = [name for name, settings in modes.items() if not settings.get(_CUDA_GRAPHS)]
    if mode is None or mode in working:
        return modes[mode] if mode else {}
    if mode not in modes:
        raise ArgumentError(f"unknown mode {mode!r}; backend 'fcdp' takes {', '.join(working)}")
    near = f"{mode}-no-cudagraphs"
    instead = f"mode={near!r}" if near in working else "mode='default'"
    raise ArgumentError(
        f"mode {mode!r} records CUDA graphs, which cannot hold the collectives and copies of backend 'fcdp'; "
        f"use {instead}"
    )


@functools.cache
def _warn_once(device_type: str, reason: str) -> None:
    log.warning(
        "compute='inductor' cannot compile for %s, so ATen's kernels run instead: %s",
        device_type,
        reason,
    )


def _structure(gm: GraphModule) -> str | None:
    """A text that is equal for graphs with the same structure, inputs and constants.

    None if a constant is large, or is not a tensor whose values can be read.
    """
    numbers: dict[Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        if node.op == "get_attr":
            constant = _content(getattr(gm, str(node.target), None))
            if constant is None:
                return None
            lines.append(constant)
            continue
        args = map_arg((node.args, node.kwargs), lambda n: _Name(numbers[n]))
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args}")
        if node.op == "placeholder":
            lines.append(_described(node.meta.get("val")))
    return "\n".join(lines)


class _Name(str):
    """A node's number as an argument of another node, printed without quotes, unlike a string argument."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _content(constant: object) -> str | None:
    if (
        type(constant) is not Tensor
        or constant.layout is not torch.strided
        or constant.nbytes > _MAX_CONSTANT_BYTES
    ):
        return None
    with without_modes():  # AOTAutograd compiles under a mode that takes only fake tensors
        values = constant.flatten().tolist()
    return f"{_described(constant)} {values}"


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        shape, stride = list(value.shape), list(value.stride())
        return f"{value.dtype} {shape} {stride} {value.device} {value.requires_grad}"
    if isinstance(value, torch.Generator):  # it prints as its address, and is an argument anyway
        return f"Generator {value.device}"
    return f"{type(value).__name__} {value}"
