"""Parameters for which a graph reads other values than the model's own."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from builders_graph import GraphBuilder, Where, aten, calls, make_specs
from fcdp_compile.ops import GIVEN, REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.set_apart import set_apart, shard_inputs

SPECS = make_specs({"w": (3, 3), "v": (3, 3)}, Where(nodes=2, ranks_per_node=1))


def _keys(gm: GraphModule, target: object) -> list[object]:
    return [n.args[1] for n in calls(gm, target)]  # type: ignore[arg-type]


def _builder() -> tuple[GraphBuilder, Node, Node]:
    b = GraphBuilder(SPECS)
    return b, b.shard("w"), b.shard("v")


def test_inputs_and_views_that_change_nothing_stay() -> None:
    b, w, v = _builder()
    detached = b.call(aten.detach.default, w)
    gm = b.finish(b.unshard(detached, "w"), b.unshard(w, "w"), b.unshard(v, "v"))
    before = str(gm.graph)
    assert str(set_apart(gm).graph) == before
    inputs = {str(calls(gm, UNSHARD)[i].args[1]): shard for i, shard in ((1, w), (2, v))}
    assert shard_inputs(gm.graph) == inputs


def test_computed_values_are_set_apart_with_their_gradients() -> None:
    b, w, v = _builder()
    halved = b.call(aten.mul.Tensor, w, 0.5)
    full = b.unshard(halved, "w")
    gm = set_apart(
        b.finish(full, b.unshard(v, "v"), b.reduce_grad(full, "w"), b.reduce_grad(full, "v"))
    )
    assert _keys(gm, GIVEN[UNSHARD]) == _keys(gm, GIVEN[REDUCE_GRAD]) != _keys(gm, UNSHARD)
    assert _keys(gm, UNSHARD) == _keys(gm, REDUCE_GRAD), "the neighbour stays"


def test_two_inputs_of_one_key_are_set_apart_both() -> None:
    b, w, v = _builder()
    gm = set_apart(b.finish(b.unshard(w, "w"), b.unshard(v, "w")))
    assert not calls(gm, UNSHARD)
    assert len(calls(gm, GIVEN[UNSHARD])) == 2


def test_every_key_and_gathers_before_their_first_use() -> None:
    b, w, v = _builder()
    first, second = b.unshard(w, "w"), b.unshard(v, "v")
    a = b.call(aten.relu.default, first)
    gm = set_apart(b.finish(b.call(aten.mm.default, a, second)), every=True)
    assert not calls(gm, UNSHARD)
    targets = [n.target for n in gm.graph.nodes if n.op == "call_function"]
    given = GIVEN[UNSHARD]
    assert targets == [given, aten.relu.default, given, aten.mm.default]
