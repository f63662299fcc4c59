"""Graphs before and after `lower`, and checks that hold for every graph, computed from the graph alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule, Node

from builders_graph import (
    GraphBuilder,
    Shape,
    Where,
    bucketed,
    calls,
    clone,
    make_context,
    make_specs,
    sourced,
)
from fcdp_compile import ops
from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.graph.context import META, StepMeta
from fcdp_compile.passes.lower import lower
from tests.passes.storages import storages

WHERE = Where()
SHAPES = {"a": (4, 4), "frozen": (8,), "b": (12,)}  # three sizes that divide by 4
STARTS = (
    ops.inter_all_gather,
    ops.intra_all_gather,
    ops.intra_own_all_gather,
    ops.intra_rest_all_gather,
    ops.store,
    ops.load,
    ops.collect,
    ops.accumulate,
    ops.intra_reduce_scatter,
    ops.inter_reduce_scatter,
)


def lowered(build: Callable[[GraphBuilder], GraphModule], params: dict[str, Shape], **more: Any):
    """Lower a hand-made graph as a forward of zero3; returns it before and after."""
    specs = make_specs(params, WHERE)
    ctx = make_context(specs, WHERE, strategy="zero3", **more)
    before = build(GraphBuilder(specs))
    return before, lower(clone(before), sourced(bucketed(before, ctx)))


CONTINUES: dict[Callable[..., Any], set[Callable[..., Any]]] = {
    ops.load: {ops.intra_all_gather},
    ops.inter_all_gather: {ops.store, ops.intra_all_gather, ops.intra_rest_all_gather},
    ops.intra_all_gather: set(),
    ops.intra_own_all_gather: {ops.intra_rest_all_gather},
    ops.intra_rest_all_gather: set(),
    ops.store: set(),
    ops.collect: {ops.accumulate, ops.intra_reduce_scatter, ops.inter_reduce_scatter},
    ops.accumulate: set(),
    ops.intra_reduce_scatter: {ops.collect, ops.inter_reduce_scatter},
    ops.inter_reduce_scatter: set(),
}
"""The steps that may take a step's result before a wait for it."""


def check(gm: GraphModule, unlowered: GraphModule) -> None:
    """Check everything that holds for any lowered graph."""
    gm.graph.lint()
    order = {n: i for i, n in enumerate(gm.graph.nodes)}
    assert not calls(gm, UNSHARD)
    assert not calls(gm, REDUCE_GRAD)
    for node in order:
        if node.target in STARTS:
            takers = [u.target for u in node.users if u.target is not ops.wait]
            assert CONTINUES[node.target].issuperset(takers)
            assert len(set(takers)) == len(takers)
            waits = [u for u in node.users if u.target is ops.wait]
            assert len(waits) == (not set(takers) - {ops.store})
        if node.target in ops.EXPLICIT and node.target not in (ops.stamp, ops.check):
            meta = node.meta[META]
            assert isinstance(meta, StepMeta)
            assert meta.step.kind.value == node.target.__name__
            assert meta.step.lane is meta.step.kind.lane
            assert meta.step.bucket == node.kwargs["bucket"]
    for node in calls(gm, ops.store):
        (wait,) = node.users
        assert all(n.target is ops.wait or n.op == "output" for n in _from(wait))
    for kind in (*(s for s in STARTS if "gather" in s.__name__), ops.load, ops.free):
        ids = [n.kwargs["bucket"] for n in calls(gm, kind)]
        assert len(ids) == len(set(ids)), f"{kind.__name__} twice for a bucket"
    memory = storages(gm)
    for free in calls(gm, ops.free):
        freed = {memory[p] for p in free.args}
        readers = [n for n in order if any(memory.get(i) in freed for i in n.all_input_nodes)]
        assert max(readers, key=order.__getitem__) is free
        assert order[readers[-2]] == order[free] - 1
    assert _shapes(gm) == _shapes(unlowered)


def _from(node: Node) -> list[Node]:
    found = []
    while node.op != "root":
        found.append(node)
        node = node.next
    return found


def _shapes(gm: GraphModule) -> list[object]:
    return [
        (o.meta["val"].shape, o.meta["val"].dtype) if isinstance(o, Node) else o
        for o in gm.graph.output_node().args[0]
    ]
