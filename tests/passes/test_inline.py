"""A function's operations as nodes; equal functions are traced once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from builders_graph import GraphBuilder
from fcdp_compile.passes.graph import inline as inline_module
from fcdp_compile.passes.graph.inline import Inliner


def scaled_twice(
    factors: list[float], *, size: int = 4, inliner: Inliner | None = None
) -> GraphModule:
    """Return a graph: x -> its halves, which are views, each times a factor."""
    b = GraphBuilder({})
    x = b.input("x", (size,))
    gm = b.finish(x)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        results = (inliner or Inliner()).inline(
            gm.graph, lambda t: [h * f for h, f in zip(t[0].chunk(2), factors, strict=True)], [x]
        )
    output.args = (tuple(results),)
    gm.recompile()
    return gm


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are traced."""
    made: list[Graph] = []
    real = inline_module.make_fx

    def keeping(*args: Any) -> Any:
        def call(*values: Tensor) -> GraphModule:
            traced = real(*args)(*values)
            made.append(traced.graph)
            return traced

        return call

    monkeypatch.setattr(inline_module, "make_fx", keeping)
    return made


def test_nodes_compute_what_the_function_does_and_have_its_values() -> None:
    gm = scaled_twice([2.0, 3.0])
    one, two = gm(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert (one.tolist(), two.tolist()) == ([2.0, 4.0], [9.0, 12.0])
    x = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
    for node in (n for n in gm.graph.nodes if n.op == "call_function"):
        value = node.meta["val"]
        if isinstance(value, Tensor):
            assert value.fake_mode is x.fake_mode


def test_equal_functions_are_traced_once_and_no_value_is_kept(traces: list[Graph]) -> None:
    inliner = Inliner()
    for _ in range(3):
        scaled_twice([2.0, 3.0], inliner=inliner)
    (trace,) = traces
    assert [n for n in trace.nodes if n.meta] == []


@pytest.mark.parametrize(("factors", "size"), [([2.0, 4.0], 4), ([2.0, 3.0], 6)])
def test_other_values_and_other_shapes_are_traced_anew(
    traces: list[Graph], factors: list[float], size: int
) -> None:
    inliner = Inliner()
    scaled_twice([2.0, 3.0], inliner=inliner)
    one, two = scaled_twice(factors, size=size, inliner=inliner)(torch.ones(size))
    assert len(traces) == 2
    assert one.tolist() == [factors[0]] * (size // 2)
    assert two.tolist() == [factors[1]] * (size // 2)


def test_a_default_value_is_refused() -> None:
    b = GraphBuilder({})
    x = b.input("x", (4,))
    gm = b.finish(x)
    with pytest.raises(AssertionError, match="default value"):
        Inliner().inline(gm.graph, lambda t, f=2.0: [t[0] * f], [x])
