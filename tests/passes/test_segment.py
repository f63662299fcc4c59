"""Compute between explicit nodes becomes submodules that can be compiled on their own."""

from __future__ import annotations

import operator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from builders_graph import GraphBuilder, Where, aten, calls, lower_toy
from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META, Packing
from fcdp_compile.passes.segment import segment

WHERE = Where()
SHAPES = {"a": (4, 4), "b": (5,), "frozen": (8,)}


def kinds(gm: GraphModule) -> list[str]:
    found = []
    for n in gm.graph.nodes:
        if n.op == "call_module":
            found.append("segment")
        elif n.target in ops.EXPLICIT:
            found.append("explicit")
    return found


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
def test_only_what_it_promises_is_left(strategy: str) -> None:
    made = lower_toy(SHAPES, WHERE, strategy=strategy, frozen=["frozen"], segmented=True)
    for gm in made.graphs.values():
        assert {n.op for n in gm.graph.nodes} <= {
            "placeholder",
            "call_function",
            "call_module",
            "output",
        }
        for n in gm.graph.nodes:
            if n.op == "call_function":
                assert n.target in ops.EXPLICIT or n.target is operator.getitem
        gm.graph.lint()


def test_explicit_nodes_stay_in_order_and_segments_are_never_neighbours() -> None:
    def explicit(segmented: bool) -> list[str]:
        gm = lower_toy(SHAPES, WHERE, frozen=["frozen"], segmented=segmented).backward
        return [n.target.__name__ for n in gm.graph.nodes if n.target in ops.EXPLICIT]

    assert explicit(segmented=True) == explicit(segmented=False)
    found = kinds(lower_toy(SHAPES, WHERE, segmented=True).backward)
    assert "segment" in found
    assert ("segment", "segment") not in pairwise(found)


def test_segments_return_tuples_of_what_is_needed_after_them() -> None:
    gm = lower_toy(SHAPES, WHERE, segmented=True).backward
    for call in gm.graph.find_nodes(op="call_module"):
        inner = gm.get_submodule(call.target)
        inner.graph.lint()
        (results,) = inner.graph.output_node().args
        assert isinstance(results, tuple)
        taken = sorted(u.args[1] for u in call.users)
        assert taken == list(range(len(results)))
        assert all(u.target is operator.getitem and u.users for u in call.users)
        inputs = inner.graph.find_nodes(op="placeholder")
        assert len(inputs) == len(call.args) == len(set(call.args))
        for node in [*inputs, *results]:
            assert isinstance(node.meta["val"], Tensor)


def test_segments_are_numbered_in_order() -> None:
    gm = lower_toy(SHAPES, WHERE, segmented=True).forward()
    names = [n.target for n in gm.graph.find_nodes(op="call_module")]
    assert names == [f"segment_{i}" for i in range(len(names))]
    assert len(names) > 1


def test_no_segment_computes_nothing() -> None:
    """A view left behind by an unshard would be a segment without results."""
    made = lower_toy(SHAPES, WHERE, segmented=True, viewed=True)
    for gm in made.graphs.values():
        assert all(n.users for n in gm.graph.find_nodes(op="call_module"))


@pytest.mark.parametrize("strategy", ["zero3", "fcdp"])
def test_what_lines_up_the_shards_of_a_bucket_is_a_segment_of_its_own(strategy: str) -> None:
    gm = lower_toy(
        SHAPES, WHERE, strategy=strategy, bucket_bytes=1, scheduled=True, segmented=True
    ).forward()
    packings = []
    for call in gm.graph.find_nodes(op="call_module"):
        inner = gm.get_submodule(call.target).graph
        marks = {n.meta.get(META) for n in inner.nodes if n.op == "call_function"}
        if any(isinstance(m, Packing) for m in marks):
            (mark,) = marks
            packings.append(mark.bucket)
    assert packings == [n.kwargs["bucket"] for n in calls(gm, ops.inter_all_gather)]
    assert len(packings) == len(SHAPES)


def test_equal_layers_have_equal_segments_wherever_prefetching_begins_and_ends() -> None:
    def distinct(layers: int) -> set[tuple[object, ...]]:
        shapes = {f"w{i}": (4, 4) for i in range(layers)}
        gm = lower_toy(shapes, WHERE, bucket_bytes=1, scheduled=True, segmented=True).forward()
        inner = [gm.get_submodule(c.target).graph for c in gm.graph.find_nodes(op="call_module")]
        return {tuple((n.op, n.op == "call_function" and n.target) for n in g.nodes) for g in inner}

    assert distinct(12) == distinct(5)


def test_constants_are_copied_into_each_segment_that_reads_them() -> None:
    b = GraphBuilder({})
    x = b.input("x", (3,))
    gm = b.finish(x)
    gm.register_buffer("constant", torch.tensor([1.0, 2.0, 3.0]))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        constant = gm.graph.get_attr("constant")
        first = gm.graph.call_function(aten.add.Tensor, (x, constant))
        gm.graph.call_function(ops.free, (x,), {"bucket": 0})
        second = gm.graph.call_function(aten.mul.Tensor, (first, constant))
    output.args = ((second,),)
    for n in gm.graph.nodes:
        n.meta.setdefault("val", x.meta["val"])
    segment(gm)
    assert len(gm.graph.find_nodes(op="call_module")) == 2
    assert not gm.graph.find_nodes(op="get_attr")
    value = torch.ones(3)
    (one,) = gm.get_submodule("segment_0")(value)
    (two,) = gm.get_submodule("segment_1")(one)
    assert two.tolist() == [2.0, 6.0, 12.0]


def test_a_graph_without_compute_stays_as_it_is() -> None:
    b = GraphBuilder({})
    gm = b.finish(b.input("x", (3,)))
    before = str(gm.graph)
    assert str(segment(gm).graph) == before
    control = GraphBuilder({})
    gm = control.finish(control.call(aten.relu.default, control.input("x", (3,))))
    assert "segment_0" in str(segment(gm).graph)


def test_inputs_may_be_returned_and_compute_between_inputs_is_cut() -> None:
    b = GraphBuilder({})
    x = b.input("x", (3,))
    y = b.call(aten.relu.default, x)
    gm = segment(b.finish(x, y, y, None))
    (outputs,) = gm.graph.output_node().args
    assert outputs[0].name == "x"
    assert outputs[1] is outputs[2]
    assert outputs[3] is None
    result = gm(torch.tensor([-1.0, 0.0, 1.0]))
    assert result[1].tolist() == [0.0, 0.0, 1.0]


def test_unused_results_of_explicit_nodes_survive() -> None:
    made = lower_toy(SHAPES, WHERE, segmented=True)
    assert calls(made.backward, ops.check)
    assert calls(made.forward(), ops.stamp)
