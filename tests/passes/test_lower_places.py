"""Positions of explicit nodes: gathers and reductions beside their uses, frees behind the last reader."""

from __future__ import annotations

import operator

import pytest
from torch import Tensor
from torch.fx import GraphModule, Node

from builders_graph import (
    GraphBuilder,
    Where,
    aten,
    bucketed,
    calls,
    clone,
    known_after,
    lower_pair,
    lower_toy,
    make_context,
    make_specs,
    sourced,
    toy_backward,
    toy_forward,
)
from fcdp_compile import ops
from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.graph.context import META, Packing
from fcdp_compile.passes.lower import lower
from tests.passes.lowered import SHAPES, WHERE, check, lowered


def test_a_gather_stands_right_before_the_first_use() -> None:
    def build(b: GraphBuilder) -> GraphModule:
        shard, x = b.shard("w"), b.input("x", (4,))
        full = b.unshard(shard, "w")  # far above its use, as in recomputed code
        early = b.call(aten.relu.default, x)
        return b.finish(b.call(aten.mul.Tensor, full, b.call(aten.neg.default, early)))

    before, after = lowered(build, {"w": (4,)})
    check(after, before)
    names = [n.target for n in after.graph.nodes if n.op == "call_function"]
    assert names.index(aten.neg.default) < names.index(ops.inter_all_gather)
    assert names.index(ops.free) == names.index(aten.mul.Tensor) + 1


def test_what_lines_up_the_shards_is_marked() -> None:
    made = lower_toy(SHAPES, WHERE, bucket_bytes=1)
    for gather in calls(made.forward(), ops.inter_all_gather):
        packing = [n for n in _sources(gather) if n.op != "placeholder"]
        assert packing
        assert {n.meta[META] for n in packing} == {Packing(bucket=gather.kwargs["bucket"])}
    marked = [n for n in made.backward.graph.nodes if isinstance(n.meta.get(META), Packing)]
    assert not marked  # it loads; gradients are lined up among other compute


def _sources(node: Node) -> list[Node]:
    return [n for i in node.all_input_nodes for n in [*_sources(i), i]]


def test_reductions_start_right_after_the_last_gradient_of_the_bucket() -> None:
    specs = make_specs({"w": (4,), "v": (4,)}, WHERE)
    b = GraphBuilder(specs)
    shards, x = [b.shard(n) for n in "wv"], b.input("x", (4,))
    full = [b.unshard(s, n) for s, n in zip(shards, "wv", strict=True)]
    first = b.call(aten.mul.Tensor, full[0], x)
    reduced = b.reduce_grad(first, "w")  # before the other gradient exists
    casted = b.call(aten.neg.default, reduced)  # and something computed from it
    second = b.call(aten.mul.Tensor, full[1], x)
    late = b.call(aten.relu.default, x)
    gm = b.finish(casted, b.reduce_grad(second, "v"), late)
    ctx = make_context(specs, WHERE, strategy="zero3")
    after = lower(clone(gm), sourced(bucketed(gm, ctx)))
    check(after, gm)
    assert len(calls(after, ops.intra_reduce_scatter)) == 1
    names = [n.target for n in after.graph.nodes if n.op == "call_function"]
    start = names.index(ops.intra_reduce_scatter)
    second_grad = len(names) - 1 - names[::-1].index(aten.mul.Tensor)
    assert second_grad < start < names.index(aten.relu.default)
    assert names.index(aten.neg.default) > names.index(ops.inter_reduce_scatter)


def test_several_uses_are_one_gather_that_lives_until_the_last() -> None:
    specs = make_specs({"w": (4, 4)}, WHERE)
    before = toy_forward(specs, uses=["w", "w", "w"])
    made = lower_pair(before, toy_backward(specs), make_context(specs, WHERE), num_fwd_outputs=1)
    check(made.forward(), before)
    assert len(calls(before, UNSHARD)) == 3
    assert len(calls(made.forward(), ops.inter_all_gather)) == 1


@pytest.mark.parametrize("op", ["split", "unbind", "chunked"])
def test_pieces_of_a_parameter_keep_it_alive(op: str) -> None:
    """A fused qkv weight is split, and the pieces are views."""

    def build(b: GraphBuilder) -> GraphModule:
        full = b.unshard(b.shard("w"), "w")
        if op == "unbind":
            pieces = b.call(aten.unbind.int, full)
        elif op == "split":
            pieces = b.call(aten.split.Tensor, full, 2)
        else:
            pieces = b.call(aten.split_with_sizes.default, full, [1, 3])
        one, two = (b.call(operator.getitem, pieces, i) for i in (0, 1))
        y = b.call(aten.sum.default, one)
        return b.finish(b.call(aten.mul.Tensor, y, b.call(aten.sum.default, two)))

    before, after = lowered(build, {"w": (4, 4)})
    check(after, before)
    names = [n.target for n in after.graph.nodes if n.op == "call_function"]
    assert names.index(ops.free) > len(names) - 1 - names[::-1].index(aten.sum.default)


def test_views_of_views_keep_it_alive() -> None:
    def build(b: GraphBuilder) -> GraphModule:
        shard, x = b.shard("w"), b.input("x", (4,))
        t = b.call(aten.t.default, b.unshard(shard, "w"))
        v = b.call(aten.slice.Tensor, b.call(aten.detach.default, t), 0, 0, 2)
        x = b.call(aten.relu.default, x)
        return b.finish(b.call(aten.mul.Tensor, v, x))

    before, after = lowered(build, {"w": (4, 4)})
    check(after, before)


@pytest.mark.parametrize("viewed", [False, True])
def test_a_parameter_that_is_returned_is_not_freed(viewed: bool) -> None:
    def build(b: GraphBuilder) -> GraphModule:
        shard, x = b.shard("w"), b.input("x", (4, 4))
        full = b.unshard(shard, "w")
        kept = b.call(aten.t.default, full) if viewed else full
        return b.finish(b.call(aten.mul.Tensor, full, x), kept)

    before, after = lowered(build, {"w": (4, 4)})
    check(after, before)
    assert not calls(after, ops.free)


@pytest.mark.parametrize("views", [0, 1, 3])
@pytest.mark.parametrize(
    ("strategy", "per_node", "copies"), [("zero3", 1, 1), ("zero3", 2, 0), ("fcdp", 2, 1)]
)
def test_a_returned_one_is_a_copy_where_it_might_be_the_shard_or_cached(
    strategy: str, per_node: int, copies: int, views: int
) -> None:
    """A returned view of the parameter becomes an equal view of the copy."""
    where = Where(ranks_per_node=per_node)
    specs = make_specs({"w": (4, 4)}, where)
    b = GraphBuilder(specs)
    full = b.unshard(b.shard("w"), "w")
    ctx = make_context(specs, where, strategy=strategy)
    returned = full
    for op in [aten.t.default, aten.detach.default, aten.t.default][:views]:
        returned = b.call(op, returned)
    before = b.finish(b.call(aten.neg.default, full), returned, full)
    after = lower(clone(before), sourced(bucketed(before, ctx)))
    check(after, before)
    assert len(calls(after, aten.clone.default)) == copies
    assert len(calls(after, ops.free)) == copies


def test_unused_members_are_neither_unpacked_nor_freed() -> None:
    specs = make_specs({"a": (4, 4), "b": (5, 3)}, WHERE)
    ctx = make_context(specs, WHERE)
    first = bucketed(toy_forward(specs), ctx)
    before = toy_forward(specs, uses=["a"])
    ctx = make_context(specs, WHERE, known=known_after(first.uses), next_bucket=1)
    after = lower(clone(before), sourced(bucketed(before, ctx)))
    check(after, before)
    assert len(calls(after, ops.load)) == 1
    assert not calls(after, ops.inter_all_gather)
    (free,) = calls(after, ops.free)
    assert free.args == (calls(after, ops.intra_all_gather)[0].next,)  # all that was gathered
    assert not [
        n
        for n in after.graph.nodes
        if isinstance(n.meta.get("val"), Tensor) and tuple(n.meta["val"].shape) == (5, 3)
    ]


def test_a_dead_unshard_is_dropped() -> None:
    def build(b: GraphBuilder) -> GraphModule:
        shards = [b.shard("w"), b.shard("v")]
        b.unshard(shards[1], "v")
        return b.finish(b.call(aten.relu.default, b.unshard(shards[0], "w")))

    _, after = lowered(build, {"w": (4,), "v": (4,)}, bucket_bytes=1)
    assert len(calls(after, ops.inter_all_gather)) == 1
