"""Insert the ops of a tensor function into a graph; not a pass, a tool of the passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from fcdp_compile.torch_compat import FakeTensorMode, detect_fake_mode

Table = Mapping[Any, Callable[..., Any]]


class Inliner:
    """Inserts functions into the graphs of one compilation.

    decompositions: the table that AOTAutograd uses for the rest of the graphs.
    """

    def __init__(self, decompositions: Table | None = None) -> None:
        self._decompositions = dict(decompositions or {})
        self._traced: dict[tuple[_Closure, tuple[_Like, ...]], Graph] = {}

    def inline(
        self,
        graph: Graph,
        function: Callable[[list[Tensor]], Sequence[Tensor]],
        inputs: Sequence[Node],
        meta: Mapping[str, object] | None = None,
    ) -> list[Node]:
        """Insert `function(inputs)` at the graph's insert point and return the nodes of its results.

        The function is a lambda.  It is traced on fake tensors, so shapes must not depend on values.
        Lambdas with the same code that close over equal values, such as those that pack equal layers, are
        traced once.  meta: entries of the new nodes' `meta` besides `val`.
        """
        like = tuple(_Like.of(n.meta["val"]) for n in inputs)
        key = _Closure(function), like
        if key not in self._traced:
            self._traced[key] = self._trace(function, like)
        traced = self._traced[key]
        env: dict[Node, Node] = dict(zip(traced.find_nodes(op="placeholder"), inputs, strict=True))
        for node in traced.nodes:
            if node.op == "call_function":
                copy = env[node] = graph.node_copy(node, env.__getitem__)
                args, kwargs = map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
                copy.meta = {"val": node.target(*args, **kwargs), **(meta or {})}
        results: Any = traced.output_node().args[0]
        return [env[n] for n in results]

    def _trace(
        self, function: Callable[[list[Tensor]], Sequence[Tensor]], like: tuple[_Like, ...]
    ) -> Graph:
        # While AOTAutograd calls the passes, its fake mode is on and refuses fake tensors of other modes.
        with detect_fake_mode() or FakeTensorMode():
            values = [
                torch.empty_strided(v.shape, v.stride, dtype=v.dtype, device=v.device) for v in like
            ]
        traced = make_fx(lambda *tensors: list(function(list(tensors))), self._decompositions)
        graph = traced(*values).graph
        for node in graph.nodes:  # so that nothing keeps this trace's values and fake mode
            node.meta.clear()
        return graph


class _Like(NamedTuple):
    """The properties of a tensor that the trace of a function depends on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(value: Tensor) -> _Like:
        return _Like(tuple(value.shape), value.stride(), value.dtype, value.device)


class _Closure:
    """A function; two are equal if they have the same code and close over equal values."""

    def __init__(self, function: Callable[..., Any]) -> None:
        assert not function.__defaults__, "an argument's default value would not be compared"
        self.function = function
        cells = function.__closure__ or ()
        self._key = function.__code__, tuple(_frozen(c.cell_contents) for c in cells)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Closure) and self._key == other._key


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list) else value


def fake_flat(like: Node, elements: int, dtype: torch.dtype) -> Tensor:
    """A fake tensor [elements] with the device and fake mode of `like`'s value."""
    value: Tensor = like.meta["val"]
    return value.new_empty(elements, dtype=dtype)
