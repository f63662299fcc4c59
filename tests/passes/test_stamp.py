"""The generations that a forward hands to its backward."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from builders_graph import (
    GraphBuilder,
    Where,
    bucketed,
    calls,
    lower_toy,
    make_context,
    make_specs,
    toy_backward,
    toy_forward,
)
from fcdp_compile import ops
from fcdp_compile.passes.graph.context import buckets_of
from fcdp_compile.passes.stamp import stamp
from fcdp_compile.plan import Variant

WHERE = Where()
SHAPES = {"a": (4, 4), "b": (64, 8)}


def stamped():
    specs = make_specs(SHAPES, WHERE)
    ctx = make_context(specs, WHERE, bucket_bytes=512)
    fw, bw = toy_forward(specs), toy_backward(specs)
    ids = tuple(b.id for b in buckets_of(bucketed(bw, ctx).uses))
    stamp(fw, bw, ids, num_fwd_outputs=1)
    return fw, bw, ids


def test_forward_returns_what_the_backward_takes_in_the_same_place() -> None:
    fw, bw, ids = stamped()
    (made,) = calls(fw, ops.stamp)
    (checked,) = calls(bw, ops.check)
    assert len(ids) == 2
    assert made.args == (ids,)
    assert checked.args[1] == ids
    saved = list(fw.graph.output_node().args[0])[1:]
    inputs = bw.graph.find_nodes(op="placeholder")
    assert saved[-1] is made
    assert inputs.index(checked.args[0]) == saved.index(made)
    assert inputs[-1].name == "tangent"
    assert (made.meta["val"].dtype, made.meta["val"].shape) == (torch.int64, (3 + 2,))


def test_the_check_comes_before_anything_else() -> None:
    _, bw, _ = stamped()
    first = next(n for n in bw.graph.nodes if n.op != "placeholder")
    assert first.target is ops.check


def test_it_stands_behind_tensors_and_before_symbols() -> None:
    specs = make_specs({"a": (4, 4)}, WHERE)
    with FakeTensorMode():
        number = torch.empty(()).numel()  # a symbol's value: a number, not a tensor
    f = GraphBuilder(specs)
    shard, size = f.shard("a"), f.input("size")
    size.meta["val"] = number
    full = f.unshard(shard, "a")
    fw = f.finish(full, shard, size)
    b = GraphBuilder(specs)
    size, shard, tangent = b.input("size"), b.shard("a"), b.input("tangent", (4, 4))
    size.meta["val"] = number
    grad = b.call(torch.ops.aten.mul.Tensor, b.unshard(shard, "a"), tangent)
    bw = b.finish(b.reduce_grad(grad, "a"), None)
    stamp(fw, bw, [0], num_fwd_outputs=1)
    names = [n.name for n in fw.graph.output_node().args[0][1:]]
    assert names == ["shard_a", "stamp", "size"]
    inputs = [n.name for n in bw.graph.find_nodes(op="placeholder")]
    assert inputs == ["size", "shard_a", "stamps", "tangent"]


@pytest.mark.parametrize("reduces", [True, False])
def test_a_backward_that_neither_gathers_nor_reduces_needs_no_stamp(reduces: bool) -> None:
    specs = make_specs({"a": (4, 4)}, WHERE)
    f, b = GraphBuilder(specs), GraphBuilder(specs)
    fw = f.finish(f.unshard(f.shard("a"), "a"))
    tangent = b.input("tangent", (4, 4))
    bw = b.finish(b.reduce_grad(tangent, "a") if reduces else tangent)
    before = str(fw.graph), str(bw.graph)
    stamp(fw, bw, [], num_fwd_outputs=1)
    assert ((str(fw.graph), str(bw.graph)) == before) == (not reduces)
    if reduces:
        (made,) = calls(fw, ops.stamp)
        assert (made.args, made.meta["val"].shape) == (((),), (3,))


def test_both_variants_stamp_and_only_the_backward_checks() -> None:
    made = lower_toy(SHAPES, WHERE)
    counts = {
        key: (len(calls(gm, ops.stamp)), len(calls(gm, ops.check)))
        for key, gm in made.graphs.items()
    }
    forwards = [made.forward(v) for v in (Variant.COLD, Variant.WARM)]
    assert all(f in made.graphs.values() for f in forwards)
    assert sorted(counts.values()) == [(0, 1)] * 3 + [(1, 0)] * 2
