"""Equal segments are compiled once, and different ones never taken for equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from builders_graph import GraphBuilder, aten
from fcdp_compile import torch_compat
from fcdp_compile.compute import Compute


def scaled(
    shape: tuple[int, ...] = (3,),
    *,
    factor: float = 2.0,
    name: str = "x",
    dtype: torch.dtype = torch.float32,
    twice: bool = False,
) -> GraphModule:
    b = GraphBuilder({})
    y = b.call(aten.mul.Tensor, b.input(name, shape, dtype), factor)
    return b.finish(b.call(aten.neg.default, y), *([y] if twice else []))


def with_constant(value: float) -> GraphModule:
    b = GraphBuilder({})
    x = b.input("x", (3,))
    gm = b.finish(x)
    gm.register_buffer("constant", torch.full((3,), value))
    with gm.graph.inserting_before(gm.graph.output_node()):
        constant = gm.graph.get_attr("constant")
        total = gm.graph.call_function(aten.add.Tensor, (x, constant))
    constant.meta["val"] = total.meta["val"] = x.meta["val"]
    gm.graph.output_node().args = ((total,),)
    gm.recompile()
    return gm


def strided() -> GraphModule:
    gm = scaled((4, 3))
    (x,) = gm.graph.find_nodes(op="placeholder")
    x.meta["val"] = x.meta["val"].t().contiguous().t()
    return gm


@pytest.fixture
def compute() -> Compute:
    return Compute("eager")


def test_equal_ones_are_compiled_once(compute: Compute) -> None:
    first = compute.compile(scaled())
    assert compute.compile(scaled()) is first
    assert compute.compile(scaled(name="other_name")) is first
    (y,) = first([torch.ones(3)])
    assert y.tolist() == [-2.0] * 3


@pytest.mark.parametrize(
    "other",
    [
        lambda: scaled((4,)),
        lambda: scaled(factor=3.0),
        lambda: scaled(dtype=torch.float64),
        lambda: scaled(twice=True),
        lambda: scaled((4, 3)),
        lambda: with_constant(1.0),
    ],
    ids=["shape", "number", "dtype", "outputs", "rank", "constant"],
)
def test_different_ones_are_not(compute: Compute, other: Any) -> None:
    assert compute.compile(other()) is not compute.compile(scaled())


def test_strides_are_a_difference(compute: Compute) -> None:
    assert compute.compile(scaled((4, 3))) is not compute.compile(strided())
    assert compute.compile(strided()) is compute.compile(strided())


def test_which_input_is_which_is_a_difference(compute: Compute) -> None:
    def difference(*, swapped: bool) -> GraphModule:
        b = GraphBuilder({})
        x, y = b.input("x", (3,)), b.input("y", (3,))
        return b.finish(b.call(aten.sub.Tensor, *((y, x) if swapped else (x, y))))

    one, two = (compute.compile(difference(swapped=s)) for s in (False, True))
    given = torch.ones(3), torch.zeros(3)
    assert one([*given])[0].tolist() == [1.0] * 3
    assert two([*given])[0].tolist() == [-1.0] * 3


def test_constants_are_never_shared(compute: Compute) -> None:
    one, two = compute.compile(with_constant(1.0)), compute.compile(with_constant(5.0))
    assert one([torch.zeros(3)])[0].tolist() == [1.0] * 3
    assert two([torch.zeros(3)])[0].tolist() == [5.0] * 3


def test_arguments_are_emptied(compute: Compute) -> None:
    args = [torch.ones(3)]
    compute.compile(scaled())(args)
    assert args == []


def test_inductor_compiles_equal_ones_once_too(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def fake(gm: GraphModule, inputs: Any) -> Any:
        compiled.append([tuple(i.shape) for i in inputs])
        return gm.forward

    monkeypatch.setattr(torch_compat, "compile_with_inductor", fake)
    compute = Compute("inductor")
    for gm in (scaled(), scaled(), scaled((4,))):
        compute.compile(gm)
    assert compiled == [[(3,)], [(4,)]]
    assert compute.decompositions()
    assert Compute("eager").decompositions() is None
