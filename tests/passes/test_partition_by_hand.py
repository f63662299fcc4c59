"""What `partition` does to joint graphs that are built by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.fx import GraphModule, Node

from builders_graph import GraphBuilder, Where, aten, calls, make_specs
from fcdp_compile.ops import REDUCE_GRAD
from fcdp_compile.passes.partition import check_saved, partition

ALONE = Where(nodes=1, ranks_per_node=1)


def joint(build: Callable[[GraphBuilder, Node], tuple[Node, Node]]) -> GraphModule:
    """A joint graph around the gradient that `build` computes from a tangent."""
    b = GraphBuilder(make_specs({"w": (3, 3), "v": (3, 3)}, ALONE))
    tangent = b.input("tangents_1", (3, 3))
    return b.finish(*build(b, tangent))


def merged(gm: GraphModule) -> GraphModule:
    """A joint graph as `partition` changes it before the partitioner splits it."""
    fw, _ = partition(gm, (), num_fwd_outputs=2, partitioner=lambda *a, **k: (gm, gm))
    return fw


def test_only_sums_of_one_key_are_merged() -> None:
    def build(b: GraphBuilder, t: Node) -> tuple[Node, Node]:
        r = [b.reduce_grad(b.call(aten.mul.Tensor, t, i), n) for i, n in enumerate("wwv")]
        same = b.call(aten.add.Tensor, r[0], r[1])
        other = b.reduce_grad(b.call(aten.neg.default, t), "w")
        return same, b.call(aten.add.Tensor, other, r[2])

    gm = merged(joint(build))
    assert len(calls(gm, REDUCE_GRAD)) == 3
    first, second = gm.graph.output_node().args[0]
    assert first.target is REDUCE_GRAD
    assert second.target is aten.add.Tensor


def test_a_merged_gradient_is_laid_out_as_the_sum_is() -> None:
    def build(b: GraphBuilder, t: Node) -> tuple[Node, Node]:
        scalar = b.call(aten.sum.default, t)
        expanded = b.reduce_grad(b.call(aten.expand.default, scalar, [3, 3]), "w")
        return b.call(aten.add.Tensor, expanded, b.reduce_grad(b.call(aten.neg.default, t), "w")), t

    (total,) = calls(merged(joint(build)), aten.add.Tensor)
    assert total.meta["val"].stride() == (3, 1), "as a compiler expects it in memory"


def test_a_reduction_that_is_read_elsewhere_is_kept() -> None:
    def build(b: GraphBuilder, t: Node) -> tuple[Node, Node]:
        one, two = (b.reduce_grad(b.call(aten.mul.Tensor, t, i), "w") for i in (1, 2))
        return b.call(aten.add.Tensor, one, two), b.call(aten.neg.default, one)

    assert len(calls(merged(joint(build)), REDUCE_GRAD)) == 2


@pytest.mark.parametrize(
    ("view", "left"),
    [
        (lambda b, n: b.call(aten.view.default, n, [3, 3]), 1),
        (lambda b, n: b.call(aten.alias.default, n), 1),
        (lambda b, n: b.call(aten.view.default, n, [9]), 2),
        (lambda b, n: b.call(aten.t.default, n), 2),
        (lambda b, n: b.call(aten.slice.Tensor, n, 0, 0, 2), 2),
    ],
    ids=["same", "alias", "flat", "transposed", "part"],
)
def test_only_views_that_change_nothing_are_looked_through(
    view: Callable[[GraphBuilder, Node], Node], left: int
) -> None:
    def build(b: GraphBuilder, t: Node) -> tuple[Node, Node]:
        r = [b.reduce_grad(b.call(aten.mul.Tensor, t, i), "w") for i in (1, 2)]
        return b.call(aten.add.Tensor, *(view(b, n) for n in r)), t

    gm = merged(joint(build))
    assert len(calls(gm, REDUCE_GRAD)) == left


def test_check_saved_refuses_what_is_made_of_parameters() -> None:
    specs = make_specs({"w": (3, 3)}, ALONE)

    def forward(*, viewed: bool) -> GraphModule:
        b = GraphBuilder(specs)
        shard = b.shard("w")
        full = b.unshard(shard, "w")
        y = b.call(aten.relu.default, full)
        return b.finish(y, b.call(aten.t.default, full) if viewed else shard)

    check_saved(forward(viewed=False), 1)
    with pytest.raises(AssertionError, match="gathered parameters are saved for backward"):
        check_saved(forward(viewed=True), 1)
