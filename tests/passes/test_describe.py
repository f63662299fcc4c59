"""The schedule describes the graph, step by step."""

from __future__ import annotations

import operator

import pytest
from torch.fx import GraphModule, Node

from builders_graph import GraphBuilder, Where, aten, lower_toy, make_context
from fcdp_compile import ops
from fcdp_compile.passes.describe import describe
from fcdp_compile.passes.segment import segment
from fcdp_compile.plan import Direction, Kind, Variant

WHERE = Where()
SHAPES = {"a": (4, 4), "b": (5,), "frozen": (8,)}


def steps_of(gm: GraphModule) -> list[Node]:
    """The nodes that are steps: explicit ones that are not bookkeeping, and segments."""
    return [
        n for n in gm.graph.nodes if n.op == "call_module" or ops.EXPLICIT.get(n.target) is not None
    ]


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
def test_one_step_a_node_in_order(strategy: str) -> None:
    made = lower_toy(
        SHAPES, WHERE, strategy=strategy, frozen=["frozen"], segmented=True, bucket_bytes=40
    )
    for (direction, variant), gm in made.graphs.items():
        schedule = describe(gm, made.contexts[direction, variant])
        assert (schedule.direction, schedule.variant) == (direction, variant)
        nodes = steps_of(gm)
        assert len(schedule.steps) == len(nodes)
        for i, (step, node) in enumerate(zip(schedule.steps, nodes, strict=True)):
            kind = Kind.COMPUTE if node.op == "call_module" else ops.EXPLICIT[node.target]
            assert (step.index, step.kind, step.lane) == (i, kind, step.kind.lane)
            assert step.bucket == node.kwargs.get("bucket")


def test_waits_are_the_steps_whose_results_are_read() -> None:
    made = lower_toy(SHAPES, WHERE, frozen=["frozen"], segmented=True, bucket_bytes=40)
    for (direction, variant), gm in made.graphs.items():
        nodes = steps_of(gm)
        for step, node in zip(
            describe(gm, made.contexts[direction, variant]).steps,
            nodes,
            strict=True,
        ):
            producers = set()
            for i in node.all_input_nodes:
                while i.target is operator.getitem:
                    i = i.args[0]
                if i in nodes:
                    producers.add(nodes.index(i))
            assert step.waits == tuple(sorted(producers))
            assert all(w < step.index for w in step.waits)


def test_a_wait_waits_for_its_start() -> None:
    made = lower_toy(SHAPES, WHERE, segmented=True)
    schedule = describe(made.backward, made.contexts[Direction.BACKWARD, Variant.COLD])
    waits = [s for s in schedule.steps if s.kind is Kind.WAIT]
    assert waits
    for step in waits:
        (start,) = step.waits
        assert schedule.steps[start].kind.value == step.label
        assert schedule.steps[start].bucket == step.bucket


def test_labels_count_the_ops_of_segments() -> None:
    b = GraphBuilder({})
    x = b.call(aten.relu.default, b.input("x", (3,)))
    gm = segment(b.finish(b.call(aten.neg.default, x)))
    (step,) = describe(gm, make_context({}, WHERE)).steps
    assert step.kind is Kind.COMPUTE
    assert step.label == "segment_0 (2 ops)"


def test_the_graph_stays_as_it_is_and_two_runs_agree() -> None:
    gm = lower_toy(SHAPES, WHERE, segmented=True).forward()
    before = str(gm.graph)
    first = describe(gm, make_context({}, WHERE))
    assert describe(gm, make_context({}, WHERE)) == first
    assert first.steps
    assert str(gm.graph) == before


def test_an_empty_graph_has_no_steps() -> None:
    b = GraphBuilder({})
    gm = segment(b.finish(b.input("x")))
    assert (
        describe(
            gm, make_context({}, WHERE, direction=Direction.INFERENCE, variant=Variant.WARM)
        ).steps
        == ()
    )
