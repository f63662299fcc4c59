"""Layers are found in compute by repetition, and cut where the fewest values cross."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from torch.fx import Node

from builders_graph import GraphBuilder, aten
from fcdp_compile.passes.segment import cut_layers


def transformer(layers: int, *, before: int = 2, after: int = 1, inner: int = 20) -> list[Node]:
    """The compute of residual layers, each of inner + 4 nodes, between other nodes."""
    b = GraphBuilder({})
    x, weight = b.input("x", (4, 4)), b.input("w", (4, 4))
    for _ in range(before):
        x = b.call(aten.tanh.default, x)
    for _ in range(layers):
        inside = b.call(aten.mm.default, b.call(aten.relu.default, x), weight)
        for _ in range(inner):
            inside = b.call(aten.sigmoid.default, inside)
        gate = b.call(aten.neg.default, x)
        x = b.call(aten.addcmul.default, x, inside, gate)
    for _ in range(after):
        x = b.call(aten.exp.default, x)
    return compute_of(b, x)


def compute_of(b: GraphBuilder, result: Node) -> list[Node]:
    return [n for n in b.finish(result).graph.nodes if n.op == "call_function"]


def targets(piece: list[Node]) -> list[str]:
    return [str(n.target) for n in piece]


@pytest.mark.parametrize("layers", [4, 5, 12])
@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 1), (9, 30)])
def test_layers_become_equal_pieces(layers: int, before: int, after: int) -> None:
    run = transformer(layers, before=before, after=after)
    pieces = cut_layers(run)
    assert [n for piece in pieces for n in piece] == run
    alike = [p for p in pieces if targets(p) == targets(pieces[len(pieces) // 2])]
    assert len(alike) >= layers - 1
    assert len(pieces) <= layers + 2


def test_they_are_cut_where_one_value_crosses() -> None:
    run = transformer(6)
    pieces = cut_layers(run)
    for i in range(1, len(pieces)):
        ahead = {n for piece in pieces[i:] for n in piece}
        crossing = [n for piece in pieces[:i] for n in piece if ahead & set(n.users)]
        assert len(crossing) == 1


@pytest.mark.parametrize("layers", [1, 2])
def test_few_layers_stay_together(layers: int) -> None:
    run = transformer(layers)
    assert cut_layers(run) == [run]
    assert len(cut_layers(transformer(6))) > 3


def test_short_layers_are_taken_together() -> None:
    pieces = cut_layers(transformer(40, inner=2))
    assert len(pieces) <= 40 * 6 // 16 + 2
    assert min(len(p) for p in pieces[1:-1]) >= 16


def test_one_op_many_times_is_no_layer() -> None:
    run = transformer(0, before=100)
    assert cut_layers(run) == [run]


def test_what_needs_no_cut_gets_none() -> None:
    assert cut_layers([]) == []
    run = transformer(0)
    assert cut_layers(run) == [run]


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=80))
def test_pieces_make_up_the_run(drawn: list[tuple[int, int]]) -> None:
    b = GraphBuilder({})
    values = [b.input("x", (2,))]
    ops = [aten.relu.default, aten.neg.default, aten.exp.default]
    for op, back in drawn:
        values.append(b.call(ops[op], values[-1 - back % len(values)]))
    run = compute_of(b, values[-1])
    assert [n for piece in cut_layers(run) for n in piece] == run
