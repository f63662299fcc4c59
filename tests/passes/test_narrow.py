"""Parameters are gathered, and gradients cross within a node, in the dtype that computation has them in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule, Node

from builders_graph import GraphBuilder, Where, aten, calls, key_of, make_context, make_specs
from fcdp_compile import ops
from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.bucket import bucket
from fcdp_compile.passes.graph.context import META
from fcdp_compile.passes.lower import lower
from fcdp_compile.passes.narrow import narrow
from fcdp_compile.plan import Direction

WHERE = Where()
SPECS = make_specs({"w": (4, 8), "v": (4, 8)}, WHERE)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Use = Callable[[GraphBuilder, Node], Node]


def cast(b: GraphBuilder, x: Node, dtype: torch.dtype) -> Node:
    return b.call(torch.ops.prims.convert_element_type.default, x, dtype)


def gathered(*uses: Use) -> GraphModule:
    """A graph that reads a parameter once for each use."""
    b = GraphBuilder(SPECS)
    shard = b.shard("w")
    return b.finish(*(use(b, b.unshard(shard, "w")) for use in uses))


def linear(b: GraphBuilder, w: Node, dtype: torch.dtype = BF16) -> Node:
    x = b.input("x", (3, 8), dtype)
    return b.call(aten.mm.default, x, b.call(aten.t.default, cast(b, w, dtype)))


def cast_view(b: GraphBuilder, w: Node) -> Node:
    first, _ = (b.call(aten.select.int, w, 0, i) for i in range(2))
    return b.call(aten.neg.default, cast(b, first, BF16))


def both(b: GraphBuilder, w: Node) -> Node:
    return b.call(aten.add.Tensor, cast(b, w, BF16), w)


@pytest.mark.parametrize("uses", [[linear], [cast_view], [linear, cast_view]])
def test_casts_move_before_the_gather(uses: list[Use]) -> None:
    gm = narrow(gathered(*uses))
    assert [n.args[2:] for n in calls(gm, UNSHARD)] == [(BF16,)] * len(uses)
    assert not calls(gm, torch.ops.prims.convert_element_type.default)
    assert {n.meta["val"].dtype for n in gm.graph.nodes if n.op == "call_function"} == {BF16}
    for node in gm.graph.nodes:  # what later passes read
        if node.target is aten.t.default:
            assert node.meta["val"].stride() == (1, 8)


def many_paths(b: GraphBuilder, w: Node) -> Node:
    """Residual connections: 2^64 paths from a parameter to the output."""
    for _ in range(64):
        w = b.call(aten.add.Tensor, w, b.call(aten.mul.Tensor, w, 0.5))
    return cast(b, w, BF16)


@pytest.mark.parametrize(
    "uses",
    [
        [both],
        [many_paths],
        [lambda b, w: w],
        [linear, lambda b, w: b.call(aten.neg.default, w)],
        [linear, lambda b, w: b.call(aten.neg.default, cast(b, w, FP16))],
        [lambda b, w: b.call(aten.neg.default, cast(b, w, torch.float64))],
        [lambda b, w: b.call(aten.neg.default, cast(b, w, torch.int8))],
        [lambda b, w: b.call(aten.neg.default, cast(b, b.call(aten.abs.default, w), BF16))],
        [lambda b, w: b.call(aten.view.dtype, w, torch.int32)],
        [],
    ],
)
def test_other_uses_keep_the_parameters_dtype(uses: list[Use]) -> None:
    gm = gathered(*uses)
    before = str(gm.graph)
    assert str(narrow(gm).graph) == before


def test_what_a_gather_rounds_is_still_rounded_twice() -> None:
    specs = make_specs({"w": (4, 8)}, WHERE, home=torch.float64, gathers=torch.float32)
    b = GraphBuilder(specs)
    gm = b.finish(linear(b, b.unshard(b.shard("w"), "w")))
    before = str(gm.graph)
    assert str(narrow(gm).graph) == before


def test_some_are_left_alone() -> None:
    gm = gathered(linear)
    before = str(gm.graph)
    assert str(narrow(gm, but=[key_of("w")]).graph) == before
    assert str(narrow(gm, but=[key_of("v")]).graph) != before


def test_graphs_share_a_bucket_only_in_one_dtype() -> None:
    wide = make_context(SPECS, WHERE)
    low = replace(wide, specs={k: replace(s, gather_dtype=BF16) for k, s in wide.specs.items()})
    keys = list(SPECS)
    first = bucket(keys, wide)
    known = {key: (use,) for key, use in first.items()}
    again = bucket(keys, replace(wide, known=known, next_bucket=1))
    assert again == first
    narrowed = bucket(keys, replace(low, known=known, next_bucket=1))
    assert {u.bucket.dtype for u in narrowed.values()} == {"bfloat16"}
    assert {u.bucket.id for u in narrowed.values()} == {1}
    both = {key: (first[key], narrowed[key]) for key in keys}
    assert bucket(keys, replace(low, known=both, next_bucket=2)) == narrowed
    assert bucket(keys, replace(wide, known=both, next_bucket=2)) == first


def reduced(
    where: Where, *casts: torch.dtype | None
) -> tuple[list[torch.dtype], list[int], GraphModule]:
    """The results' dtypes and the sent bytes of a reduction of one bucket, and its graph.

    casts: the dtype that each gradient is cast to from bf16; None: it is fp32.
    """
    specs = make_specs({"w": (4, 8), "v": (4, 8)}, where)
    b = GraphBuilder(specs)
    shards = {name: b.shard(name) for name in ("w", "v")}
    grads = []
    for name, to in zip(shards, casts, strict=True):
        grad = b.input(f"grad_{name}", (4, 8), BF16 if to else FP32)
        grad = cast(b, grad, to) if to else grad
        grads.append(b.reduce_grad(b.call(aten.view.default, grad, [4, 8]), name))
    gm = b.finish(*grads)
    ctx = replace(make_context(specs, where), direction=Direction.BACKWARD)
    uses = bucket([key_of(name) for name in shards], replace(ctx, direction=Direction.FORWARD))
    gm = lower(gm, replace(ctx, reduced=uses))
    assert not calls(gm, REDUCE_GRAD)
    steps = calls(gm, ops.intra_reduce_scatter) + calls(gm, ops.inter_reduce_scatter)
    return (
        [n.meta["val"].dtype for n in steps],
        [n.meta[META].step.bytes for n in steps],
        gm,
    )


def test_gradients_cross_a_node_as_compute_made_them() -> None:
    dtypes, sent_bytes, gm = reduced(WHERE, FP32, FP32)
    assert dtypes == [torch.float32] * 2, "sums are exact to fp32"
    assert sent_bytes == [64 * 2 // 2, 64 * 4 // 4]
    (step,) = calls(gm, ops.intra_reduce_scatter)
    assert step.all_input_nodes[0].meta["val"].dtype is BF16
    for cast_up in calls(gm, torch.ops.prims.convert_element_type.default):
        assert cast_up.args[1] is not torch.float32 or cast_up > step, "nothing is cast up before"


@pytest.mark.parametrize(
    ("where", "casts", "sent_bytes"),
    [
        (WHERE, (FP32, None), [64 * 4 // 2, 64 * 4 // 4]),
        (Where(ranks_per_node=1), (FP32, FP32), [64 * 4 // 2]),
    ],
    ids=["one is fp32", "no other rank on the node"],
)
def test_other_gradients_cross_in_the_reduce_dtype(
    where: Where, casts: tuple[torch.dtype | None, ...], sent_bytes: list[int]
) -> None:
    dtypes, found, _ = reduced(where, *casts)
    assert found == sent_bytes
    assert set(dtypes) == {torch.float32}


def test_a_cast_that_rounds_comes_before() -> None:
    _, _, gm = reduced(WHERE, FP16, FP16)
    (step,) = calls(gm, ops.intra_reduce_scatter)
    assert step.all_input_nodes[0].meta["val"].dtype is FP16
