"""Compile the compute segments: with Inductor, or as they are with ATen's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fcdp_compile import torch_compat

BoxedCallable = Callable[[list[Any]], Any]


class Compute:
    """One way of compiling segments; equal segments of one Dynamo graph are compiled once."""

    def __init__(self, kind: str) -> None:
        self._is_inductor = kind == "inductor"
        self._done: dict[str, BoxedCallable] = {}

    def decompositions(self) -> dict[Any, Any] | None:
        """What AOTAutograd should decompose for this compiler."""
        return torch_compat.inductor_decompositions() if self._is_inductor else None

    def prepare_joint(self, joint: GraphModule) -> GraphModule:
        """The compiler's own passes over the joint graph, before it is partitioned."""
        return torch_compat.joint_graph_passes(joint) if self._is_inductor else joint

    def compile(self, gm: GraphModule) -> BoxedCallable:
        """Compile a graph into a function of a list of arguments, which it empties."""
        key = _structure(gm)
        done = self._done.get(key) if key is not None else None
        if done is None:
            done = self._compile(gm)
            if key is not None:
                self._done[key] = done
        return done

    def _compile(self, gm: GraphModule) -> BoxedCallable:
        if not self._is_inductor:
            return torch_compat.boxed(gm)
        inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
        return torch_compat.compile_with_inductor(gm, inputs)


def _structure(gm: GraphModule) -> str | None:
    """Text that is the same for graphs of the same structure and inputs; None if it holds constants."""
    numbers: dict[Node, int] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            return None
        numbers[node] = len(numbers)
        args = map_arg((node.args, node.kwargs), lambda n: f"%{numbers[n]}")
        lines.append(f"{node.op} {node.target if node.op == 'call_function' else ''} {args}")
        if node.op == "placeholder":
            lines.append(_described(node.meta.get("val")))
    return "\n".join(lines)


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        shape, stride = list(value.shape), list(value.stride())
        return f"{value.dtype} {shape} {stride} {value.device} {value.requires_grad}"
    return f"{type(value).__name__} {value}"
