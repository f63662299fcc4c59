"""Insert what a tensor function does as nodes of a graph; not a pass, a tool of the passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fcdp_compile.passes.context import META


def inline(
    graph: Graph,
    function: Callable[[list[Tensor]], Sequence[Tensor]],
    inputs: Sequence[Node],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    *,
    mark: object = None,
) -> list[Node]:
    """Insert `function(inputs)` at the graph's insert point and return the nodes of its results.

    The function is traced on the inputs' fake tensors, so its shapes must not depend on their values.
    decompositions: as for the rest of the graph, by AOTAutograd.  mark: the record to leave on new nodes.
    """
    values = [n.meta["val"] for n in inputs]
    table = dict(decompositions or {})
    traced = make_fx(lambda *tensors: list(function(list(tensors))), table)(*values)
    env: dict[Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    results = graph.graph_copy(traced.graph, env)
    for old, new in env.items():
        if old.op == "call_function" and "val" in old.meta:
            new.meta["val"] = old.meta["val"]
            if mark is not None:
                new.meta[META] = mark
    return list(results)  # type: ignore[arg-type]


def fake_flat(like: Node, elements: int, dtype: torch.dtype) -> Tensor:
    """A fake tensor [elements] on the device and in the fake mode of `like`'s."""
    value: Tensor = like.meta["val"]
    return value.new_empty(elements, dtype=dtype)
