"""A function's operations as nodes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule

from builders_graph import GraphBuilder
from fcdp_compile.passes.graph.inline import Decompositions, inline
from fcdp_compile.torch_compat.tensors import storage_id

aten = torch.ops.aten


def parts(decompositions: Decompositions) -> GraphModule:
    """Return a graph: x, y -> half of x, which is a view; a third of y doubled; y."""
    b = GraphBuilder({})
    x, y = b.input("x", (6,)), b.input("y", (6,))
    y.meta["val"] = x.meta["val"]  # as a wait shares its step's value
    gm = b.finish(x)
    output = gm.graph.output_node()

    def function(inputs: list[Tensor]) -> list[Tensor]:
        x, y = inputs
        (x + y).sin()  # nothing uses it
        return [x.narrow(0, 3, 3), y.chunk(3)[1] * 2.0, y]

    with gm.graph.inserting_before(output):
        results = inline(gm.graph, function, [x, y], decompositions, {"mark": 1})
    output.args = (tuple(results),)
    gm.graph.lint()
    gm.recompile()
    return gm


def added(gm: GraphModule) -> list[object]:
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def test_nodes_compute_what_the_function_does_and_have_its_values() -> None:
    gm = parts({})
    x, y = torch.arange(6.0), torch.arange(10.0, 16.0)
    half, third, whole = gm(x, y)
    assert (half.tolist(), third.tolist(), whole is y) == ([3.0, 4.0, 5.0], [24.0, 26.0], True)
    inputs = gm.graph.find_nodes(op="placeholder")
    for node in (n for n in gm.graph.nodes if n.op == "call_function"):
        assert node.meta["mark"] == 1
        if isinstance(value := node.meta["val"], Tensor):
            assert value.fake_mode is inputs[0].meta["val"].fake_mode
    slice_val, product_val = (n.meta["val"] for n in gm.graph.output_node().args[0][:2])
    assert storage_id(slice_val) == storage_id(inputs[0].meta["val"]) != storage_id(product_val)


def test_only_what_the_results_need_stays() -> None:
    targets = added(parts({}))
    assert targets.count(aten.mul.Tensor) == 1
    assert not {aten.add.Tensor, aten.sin.default} & set(targets)
    assert len(targets) == 4, "a slice, a split, one of its parts, a product"


def test_the_compilers_decompositions_apply() -> None:
    def twice(value: Tensor, factor: float) -> Tensor:
        return value + value if factor == 2.0 else NotImplemented

    gm = parts({aten.mul.Tensor: twice})
    assert gm(torch.arange(6.0), torch.arange(6.0))[1].tolist() == [4.0, 6.0]
    assert (aten.add.Tensor in added(gm), aten.mul.Tensor in added(gm)) == (True, False)
