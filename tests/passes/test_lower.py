"""Explicit nodes: which, how many, in what order, and when buffers are given back."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch.fx import GraphModule, Node

from builders_graph import (
    GraphBuilder,
    Lowered,
    Shape,
    Where,
    aten,
    calls,
    clone,
    lower_pair,
    lower_toy,
    make_context,
    make_specs,
    toy_backward,
    toy_forward,
)
from builders_plan import shapes
from fcdp_compile import ops
from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.bucket import bucket
from fcdp_compile.passes.context import META, Packing, StepMeta
from fcdp_compile.passes.lower import lower
from fcdp_compile.passes.place import place
from fcdp_compile.plan import LANES, Direction, Variant
from tests.passes.storages import storages

WHERE = Where()
COLD, WARM = Variant.COLD, Variant.WARM
STARTS = (
    ops.inter_all_gather,
    ops.intra_all_gather,
    ops.store,
    ops.load,
    ops.intra_reduce_scatter,
    ops.inter_reduce_scatter,
)
SHAPES = {"a": (4, 4), "frozen": (8,), "b": (12,)}  # three sizes that divide by 4


def steps(gm: GraphModule) -> list[str]:
    """The explicit nodes in order, a wait with what it waits for, bookkeeping left out."""
    found = []
    for n in gm.graph.nodes:
        if n.target is ops.wait:
            found.append(f"wait {n.args[0].target.__name__}")
        elif n.target in ops.EXPLICIT and n.target not in (ops.stamp, ops.check):
            found.append(n.target.__name__)
    return found


def counts(gm: GraphModule) -> dict[str, int]:
    return {k: n for k, n in Counter(steps(gm)).items() if not k.startswith("wait")}


HOME = ["intra_all_gather", "wait intra_all_gather", "free"]
GATHER = ["inter_all_gather", *HOME]
STORED = ["inter_all_gather", "store", *HOME]
LOADED = ["load", *HOME]
WITHIN = ["intra_reduce_scatter", "wait intra_reduce_scatter"]
BETWEEN = ["inter_reduce_scatter", "wait inter_reduce_scatter"]
REDUCED = ["intra_reduce_scatter", *BETWEEN]


class TestSequences:
    """One bucket, every source."""

    def one(self, strategy: str, where: Where = WHERE, **more: Any) -> Lowered:
        return lower_toy({"w": (6, 4)}, where, strategy=strategy, **more)

    def test_gathered_and_forgotten(self) -> None:
        made = self.one("zero3")
        assert steps(made.forward()) == GATHER
        assert steps(made.backward) == [*GATHER, *REDUCED]

    @pytest.mark.parametrize("strategy", ["zero++", "fcdp"])
    def test_stored_in_the_forward_and_loaded_in_the_backward(self, strategy: str) -> None:
        made = self.one(strategy)
        assert steps(made.forward()) == [*STORED, "wait store"]
        assert steps(made.backward) == [*LOADED, *REDUCED]

    def test_warm(self) -> None:
        assert steps(self.one("fcdp").forward(WARM)) == LOADED

    @pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
    def test_one_node(self, strategy: str) -> None:
        made = self.one(strategy, Where(nodes=1, ranks_per_node=3))
        assert steps(made.forward()) == HOME
        assert steps(made.backward) == [*HOME, *WITHIN]

    def test_one_rank_a_node(self) -> None:
        made = self.one("fcdp", Where(nodes=3, ranks_per_node=1))
        inter = ["inter_all_gather", "store", "wait inter_all_gather", "free", "wait store"]
        assert steps(made.forward()) == inter
        assert steps(made.forward(WARM)) == ["load", "wait load", "free"]
        assert steps(made.backward) == ["load", "wait load", "free", *BETWEEN]

    def test_one_rank(self) -> None:
        made = self.one("fcdp", Where(nodes=1, ranks_per_node=1))
        assert steps(made.forward()) == []
        assert steps(made.backward) == []

    @pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
    def test_frozen_gradients_are_not_reduced(self, strategy: str) -> None:
        made = self.one(strategy, frozen=["w"])
        assert not {"intra_reduce_scatter", "inter_reduce_scatter"} & set(steps(made.backward))


class TestBuckets:
    """Three buckets: two trainable, one frozen."""

    def many(self, strategy: str) -> Lowered:
        return lower_toy(SHAPES, WHERE, strategy=strategy, frozen=["frozen"], bucket_bytes=1)

    def test_zero3_gathers_all_twice(self) -> None:
        made = self.many("zero3")
        gathered = {"inter_all_gather": 3, "intra_all_gather": 3, "free": 3}
        assert counts(made.forward()) == gathered
        assert counts(made.backward) == gathered | {
            "intra_reduce_scatter": 2,
            "inter_reduce_scatter": 2,
        }

    def test_zero_pp_never_gathers_between_nodes_in_the_backward(self) -> None:
        made = self.many("zero++")
        assert counts(made.forward())["store"] == counts(made.forward())["inter_all_gather"] == 3
        assert "inter_all_gather" not in counts(made.backward)
        assert counts(made.backward)["load"] == 3

    def test_fcdp_has_no_frozen_bucket_between_nodes_in_any_graph(self) -> None:
        made = self.many("fcdp")
        (frozen,) = [b.id for b in made.buckets.values() if b.frozen]
        for gm in made.graphs.values():
            inter = calls(gm, ops.inter_all_gather) + calls(gm, ops.inter_reduce_scatter)
            assert frozen not in [n.kwargs["bucket"] for n in inter]
        assert counts(made.forward()) == {
            "inter_all_gather": 2,
            "store": 2,
            "load": 1,
            "intra_all_gather": 3,
            "free": 3,
        }
        loads = {"load": 3, "intra_all_gather": 3, "free": 3}
        assert counts(made.forward(WARM)) == loads
        reduced = {"intra_reduce_scatter": 2, "inter_reduce_scatter": 2}
        assert counts(made.backward) == loads | reduced

    def test_a_shared_bucket_travels_once(self) -> None:
        made = lower_toy(SHAPES, WHERE, strategy="fcdp")
        assert counts(made.forward()) == {
            "inter_all_gather": 1,
            "store": 1,
            "intra_all_gather": 1,
            "free": 1,
        }
        assert counts(made.backward)["inter_reduce_scatter"] == 1


def test_bytes_are_those_of_the_formulas() -> None:
    where = Where(nodes=3, ranks_per_node=2)
    made = lower_toy({"w": (12, 4)}, where, strategy="fcdp", reduces=torch.float64)
    slot, total = 12 * 4 * 4 // 6, 12 * 4 * 4  # P/G and W in bytes of float32
    expected = {
        "inter_all_gather": 2 * slot,
        "store": 3 * slot,
        "intra_all_gather": 3 * slot,
        "load": 3 * slot,
        "intra_reduce_scatter": total // 2 * 2,  # twice as wide
        "inter_reduce_scatter": 2 * slot * 2,
    }
    seen = {
        n.target.__name__: n.meta[META].step.bytes
        for gm in made.graphs.values()
        for n in gm.graph.nodes
        if n.target in STARTS
    }
    assert seen == expected


def test_padding_is_counted() -> None:
    made = lower_toy({"w": (5,)}, WHERE, strategy="zero3")  # slots of 2 rows: 3 halves to 2 + 1
    (gather,) = calls(made.forward(), ops.inter_all_gather)
    (intra,) = calls(made.forward(), ops.intra_all_gather)
    assert (gather.meta[META].step.bytes, intra.meta[META].step.bytes) == (8, 16)


# --- invariants, computed from the graph alone -----------------------------------------------------------


CONTINUES: dict[Callable[..., Any], set[Callable[..., Any]]] = {
    ops.load: {ops.intra_all_gather},
    ops.inter_all_gather: {ops.store, ops.intra_all_gather},
    ops.intra_all_gather: set(),
    ops.store: set(),
    ops.intra_reduce_scatter: {ops.inter_reduce_scatter},
    ops.inter_reduce_scatter: set(),
}
"""The steps that may take a step's result while it is on its way."""


def check(gm: GraphModule, unlowered: GraphModule) -> None:
    """Everything that holds for any lowered graph."""
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
            assert meta.step.lane is LANES[meta.step.kind]
            assert meta.step.bucket == node.kwargs["bucket"]
    for node in calls(gm, ops.store):
        (wait,) = node.users
        assert all(n.target is ops.wait or n.op == "output" for n in _from(wait))
    for kind in (ops.inter_all_gather, ops.intra_all_gather, ops.load, ops.free):
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


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(shapes, min_size=1, max_size=5),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["zero3", "zero++", "fcdp"]),
    st.sampled_from([1, 200, 1 << 20]),
    st.data(),
)
def test_invariants(
    drawn: list[Shape],
    size: tuple[int, int],
    strategy: str,
    bucket_bytes: int,
    data: st.DataObject,
) -> None:
    names = [f"p{i}" for i in range(len(drawn))]
    node = data.draw(st.integers(0, size[0] - 1))
    place_ = data.draw(st.integers(0, size[1] - 1))
    where = Where(nodes=size[0], ranks_per_node=size[1], node=node, place=place_)
    specs = make_specs(dict(zip(names, drawn, strict=True)), where)
    frozen = sorted(data.draw(st.sets(st.sampled_from(names))))
    viewed = data.draw(st.booleans())
    uses = data.draw(st.permutations([*names, *data.draw(st.lists(st.sampled_from(names)))]))
    fw = toy_forward(specs, viewed=viewed, uses=uses)
    bw = toy_backward(specs, frozen=frozen, viewed=viewed)
    ctx = make_context(specs, where, strategy=strategy, frozen=frozen, bucket_bytes=bucket_bytes)
    made = lower_pair(fw, bw, ctx, num_fwd_outputs=1)
    for (direction, _), gm in made.graphs.items():
        unlowered = bw if direction is Direction.BACKWARD else fw
        check(gm, unlowered)
        gathered = len(_ids(unlowered)) if size != (1, 1) else 0
        assert len(calls(gm, ops.free)) == gathered
    gathers = len(calls(made.backward, ops.inter_all_gather))
    assert gathers == (len(_ids(bw)) if strategy == "zero3" and size[0] > 1 else 0)


def _ids(gm: GraphModule) -> set[int]:
    return {n.meta[META].bucket.id for n in calls(gm, UNSHARD)}


# --- where things stand ----------------------------------------------------------------------------------


def lowered(build: Callable[[GraphBuilder], GraphModule], params: dict[str, Shape], **more: Any):
    """A graph of one's own as a forward of zero3, before and after."""
    specs = make_specs(params, WHERE)
    ctx = make_context(specs, WHERE, strategy="zero3", **more)
    before = place(bucket(build(GraphBuilder(specs)), ctx), ctx)
    ctx = make_context(specs, WHERE, strategy="zero3", known=known(before), **more)
    return before, lower(clone(before), ctx)


def known(gm: GraphModule):
    return {str(n.args[1]): (n.meta[META].bucket,) for n in calls(gm, UNSHARD)}


def test_a_gather_stands_right_before_the_first_use() -> None:
    def build(b: GraphBuilder) -> GraphModule:
        shard, x = b.shard("w"), b.input("x", (4,))
        full = b.unshard(shard, "w")  # far above its use, as a recomputed one is
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
    assert not marked  # it loads: gradients are lined up among other compute


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
    before = place(bucket(gm, ctx), ctx)
    ctx = make_context(specs, WHERE, strategy="zero3", known=known(before))
    after = lower(clone(before), ctx)
    check(after, before)
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


@pytest.mark.parametrize(("per_node", "copies"), [(1, 1), (2, 0)])
def test_a_returned_one_is_a_copy_where_it_might_be_the_shard_itself(
    per_node: int, copies: int
) -> None:
    where = Where(ranks_per_node=per_node)
    specs = make_specs({"w": (4, 4)}, where)
    b = GraphBuilder(specs)
    full = b.unshard(b.shard("w"), "w")
    ctx = make_context(specs, where)
    before = place(bucket(b.finish(b.call(aten.neg.default, full), full), ctx), ctx)
    after = lower(clone(before), ctx)
    check(after, before)
    assert len(calls(after, aten.clone.default)) == copies
    assert len(calls(after, ops.free)) == copies


def test_unused_members_are_neither_unpacked_nor_freed() -> None:
    specs = make_specs({"a": (4, 4), "b": (5, 3)}, WHERE)
    ctx = make_context(specs, WHERE)
    first = bucket(toy_forward(specs), ctx)
    part = toy_forward(specs, uses=["a"])
    ctx = make_context(specs, WHERE, known=known(first), next_bucket=1)
    before = place(bucket(part, ctx), ctx)
    after = lower(clone(before), ctx)
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


def test_nothing_dead_is_left() -> None:
    made = lower_toy(SHAPES, WHERE, viewed=True)
    for gm in made.graphs.values():
        dead = [
            n
            for n in gm.graph.nodes
            if n.op == "call_function" and not n.users and n.target not in ops.EXPLICIT
        ]
        assert not dead


def test_a_graph_without_parameters_keeps_its_nodes() -> None:
    b = GraphBuilder({})
    gm = b.finish(b.call(aten.relu.default, b.input("x", (2,))))
    before = str(gm.graph)
    assert str(lower(gm, make_context({}, WHERE)).graph) == before
    control = lower_toy({"w": (4,)}, WHERE)
    assert steps(control.forward())


def test_sources_must_be_known() -> None:
    specs = make_specs({"w": (4,)}, WHERE)
    ctx = make_context(specs, WHERE)
    with pytest.raises(AssertionError, match="run `place` first"):
        lower(bucket(toy_forward(specs), ctx), ctx)


def test_a_gather_needs_every_member() -> None:
    specs = make_specs({"a": (4,), "b": (4,)}, WHERE)
    ctx = make_context(specs, WHERE, strategy="zero3")
    whole = place(bucket(toy_forward(specs), ctx), ctx)
    use = calls(whole, UNSHARD)[0].meta[META]
    part = toy_forward(specs, uses=["a"])
    calls(part, UNSHARD)[0].meta[META] = use
    with pytest.raises(AssertionError, match=r"cannot be gathered in a graph without \['b'\]"):
        lower(part, ctx)


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
def test_two_runs_give_the_same_text(strategy: str) -> None:
    def texts() -> list[str]:
        made = lower_toy(SHAPES, WHERE, strategy=strategy, frozen=["frozen"], segmented=True)
        return [str(gm.graph) for gm in made.graphs.values()]

    assert texts() == texts()


def test_gathers_cast_to_the_dtype_that_travels() -> None:
    made = lower_toy({"w": (4, 4), "b": (3,)}, WHERE, gathers=torch.bfloat16, reduces=torch.float32)
    for op, dtype in [
        (ops.inter_all_gather, torch.bfloat16),
        (ops.intra_reduce_scatter, torch.float32),
    ]:
        nodes = [n for gm in made.graphs.values() for n in calls(gm, op)]
        assert nodes
        assert {n.args[0].meta["val"].dtype for n in nodes} == {dtype}
    outputs = made.backward.graph.output_node().args[0][1:]
    assert [o.meta["val"].dtype for o in outputs] == [torch.float32] * 2
