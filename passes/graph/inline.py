"""Insert the ops of a tensor function into a graph; not a pass, a tool of the passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fcdp_compile.torch_compat import DispatchMode, OpOverload, tree_map_only

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

    The function runs once, on the inputs' fake values, so shapes must not depend on values.
    meta: entries of the new nodes' `meta` besides `val`.
    """
    # Aliases, so that each input has a value of its own, without a gradient.
    values = [n.meta["val"].detach() for n in inputs]
    recorder = _Recorder(graph, decompositions, meta or {})
    recorder.nodes = {id(v): n for v, n in zip(values, inputs, strict=True)}
    with recorder:
        results = [recorder.nodes[id(r)] for r in function(values)]
    for node in reversed(recorder.added):
        if not node.users and node not in results:
            graph.erase_node(node)
    return results


class _Recorder(DispatchMode):
    """Inserts every op that runs into a graph.

    nodes: by the ids of their values, which the nodes' `meta` keeps alive.
    """

    def __init__(
        self, graph: Graph, decompositions: Decompositions, meta: Mapping[str, object]
    ) -> None:
        super().__init__()
        self._graph = graph
        self._decompositions = decompositions
        self._meta = meta
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
        if func.namespace == "prim":  # asks for a property of a tensor, such as its device
            return func(*args, **kwargs)
        with self:
            for decompose in (self._decompositions.get(func), func.decompose):
                if decompose is not None:
                    result = decompose(*args, **kwargs)
                    if result is not NotImplemented:
                        return result
        result = func(*args, **kwargs)
        taken = tree_map_only(Tensor, lambda t: self.nodes[id(t)], (args, kwargs))
        node = self._add(func, *taken, name=func.overloadpacket.__name__, value=result)
        if isinstance(result, list | tuple):
            for index, part in enumerate(result):
                self._add(operator.getitem, (node, index), {}, name="getitem", value=part)
        return result

    def _add(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        value: Any,
    ) -> Node:
        node = self._graph.create_node("call_function", target, args, kwargs, name)
        node.meta = {"val": value, **self._meta}
        self.added.append(node)
        if isinstance(value, Tensor):
            self.nodes[id(value)] = node
        return node


def fake_flat(like: Node, elements: int, dtype: torch.dtype) -> Tensor:
    """A fake tensor [elements] with the device and fake mode of `like`'s value."""
    value: Tensor = like.meta["val"]
    return value.new_empty(elements, dtype=dtype)
