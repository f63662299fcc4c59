"""Insert the ops of a tensor function into a graph, and copy graphs; not a pass, tools of the passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from fcdp_compile.torch_compat import (
    DispatchMode,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    detect_fake_mode,
)
from fcdp_compile.torch_compat.autograd import without_modes
from fcdp_compile.torch_compat.graphs import fake_of, graph_module, meta_of

Decompositions = Mapping[Any, Callable[..., Any]]
"""For each op that a compiler does not take, a function that computes it with other ops."""


def inline(
    graph: Graph,
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    inputs: Sequence[Node],
    decompositions: Decompositions,
    meta: Mapping[str, object] | None = None,
) -> list[Node]:
    """Insert `function(inputs)` at the graph's insert point and return the nodes of its results.

    The function runs once, on meta tensors: ops on fake tensors take ten times as long.  It makes new
    tensors on the device of its inputs, which is the same for all.
    meta: entries of the new nodes' `meta` besides `val`.
    """
    recorder = _Recorder(graph, inputs[0].meta["val"], decompositions, meta or {})
    with without_modes():
        values = [meta_of(n.meta["val"]) for n in inputs]
        recorder.nodes = {id(v): n for v, n in zip(values, inputs, strict=True)}
        with recorder:
            results = [recorder.nodes[id(r)] for r in function(values)]
    for node in reversed(recorder.added):
        if not node.users and node not in results:
            graph.erase_node(node)
    return results


class _Recorder(DispatchMode):
    """Inserts every op that runs into a graph.

    nodes: by the ids of their values, which live as long as the recorder.
    """

    def __init__(
        self,
        graph: Graph,
        like: FakeTensor,
        decompositions: Decompositions,
        meta: Mapping[str, object],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._graph = graph
        self._like = like
        self._decompositions = decompositions
        self._meta = meta
        self._kept: list[Any] = []
        self.nodes: dict[int, Node] = {}
        self.added: list[Node] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (decompose := self._decompositions.get(func)) is not None:
            with self:
                result = decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        self._kept.append(result)
        taken: Any = map_aggregate((args, kwargs), self._in_graph)
        if isinstance(result, Tensor):
            self._add(func, *taken, value=result, name=func.overloadpacket.__name__)
            return result
        parts = [fake_of(part, self._like) for part in result]
        node = self._add(func, *taken, value=parts, name=func.overloadpacket.__name__)
        for index, part in enumerate(result):
            self._add(operator.getitem, (node, index), {}, value=part, name="getitem")
        return result

    def _in_graph(self, value: Any) -> Any:
        """What stands for an argument of an op in the graph."""
        if isinstance(value, torch.device):
            return self._like.device
        return self.nodes[id(value)] if isinstance(value, Tensor) else value

    def _add(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        value: Tensor | list[FakeTensor],
        name: str,
    ) -> Node:
        node = self._graph.create_node("call_function", target, args, kwargs, name)
        if isinstance(value, Tensor):
            self.nodes[id(value)] = node
            value = fake_of(value, self._like)
        node.meta = {"val": value, **self._meta}
        self.added.append(node)
        return node


def clone(gm: GraphModule) -> GraphModule:
    """A copy of a graph whose nodes may be changed; it shares fake values and constants."""
    graph = Graph()
    env: dict[Node, Node] = {}
    results = graph.graph_copy(gm.graph, env)
    graph.output(results)
    return graph_module(gm, graph)


def fake_mode(gm: GraphModule) -> FakeTensorMode:
    """The mode of the fake tensors that a graph was traced with."""
    mode: FakeTensorMode | None = detect_fake_mode([n.meta.get("val") for n in gm.graph.nodes])
    assert mode is not None, "graphs are traced with fake tensors"
    return mode


def fake_flat(like: Node, elements: int, dtype: torch.dtype) -> Tensor:
    """A fake tensor [elements] with the device and fake mode of `like`'s value."""
    value: Tensor = like.meta["val"]
    return value.new_empty(elements, dtype=dtype)
