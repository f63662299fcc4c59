"""Explicit nodes: their kinds, numbers, order and bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule

from builders_graph import (
    GraphBuilder,
    Lowered,
    Shape,
    Where,
    aten,
    bucketed,
    calls,
    lower_pair,
    lower_toy,
    make_context,
    make_specs,
    sourced,
    toy_backward,
    toy_forward,
)
from builders_plan import shapes
from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META, buckets_of
from fcdp_compile.passes.lower import lower
from fcdp_compile.plan import Direction, Variant
from tests.passes.lowered import SHAPES, STARTS, WHERE, check

WARM = Variant.WARM


def steps(gm: GraphModule) -> list[str]:
    """The explicit nodes in order, without bookkeeping; a wait names the step it waits for."""
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
        "collect": 3 * slot * 2,
        "accumulate": 3 * slot * 2,
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


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(shapes, min_size=1, max_size=5),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["zero3", "zero++", "fcdp", "zero3+ho_ring", "zero+++ho_ring"]),
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
    for key, gm in made.graphs.items():
        check(gm, bw if key[0] is Direction.BACKWARD else fw)
        gathered = len(buckets_of(made.contexts[key].uses)) if size != (1, 1) else 0
        assert len(calls(gm, ops.free)) == gathered
    crossing = (ops.inter_all_gather,)
    gathers = sum(len(calls(made.backward, op)) for op in crossing)
    of_backward = buckets_of(made.contexts[Direction.BACKWARD, Variant.COLD].uses)
    assert gathers == (len(of_backward) if strategy.startswith("zero3") and size[0] > 1 else 0)


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
    ctx, gm = make_context(specs, WHERE), toy_forward(specs)
    with pytest.raises(AssertionError, match="run `choose_sources` first"):
        lower(gm, bucketed(gm, ctx))


def test_a_gather_needs_every_member() -> None:
    specs = make_specs({"a": (4,), "b": (4,)}, WHERE)
    ctx = make_context(specs, WHERE, strategy="zero3")
    ctx = sourced(bucketed(toy_forward(specs), ctx))
    part = toy_forward(specs, uses=["a"])
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
        (ops.intra_reduce_scatter, torch.bfloat16),  # as computation made them; its sum is fp32
        (ops.inter_reduce_scatter, torch.float32),
    ]:
        nodes = [n for gm in made.graphs.values() for n in calls(gm, op)]
        assert nodes
        assert {n.args[0].meta["val"].dtype for n in nodes} == {dtype}
    outputs = made.backward.graph.output_node().args[0][1:]
    assert [o.meta["val"].dtype for o in outputs] == [torch.float32] * 2
