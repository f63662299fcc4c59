"""A plan for alike parameters is the plan that the passes would make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule

from builders_graph import Where, key_of, make_context, make_specs, toy_backward, toy_forward
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.graph.inline import clone
from fcdp_compile.passes.planning.alike import Counterparts, plan_alike, renamed
from fcdp_compile.passes.planning.book import BucketBook
from fcdp_compile.passes.planning.placement import Room
from fcdp_compile.passes.planning.plan_graphs import Planned, plan_accumulation, plan_graphs
from fcdp_compile.plan import Direction
from fcdp_compile.strategy import PRESETS, Cache, Strategy
from tests.marks import quick

SHAPES = {"w": (12, 4), "bias": (12,), "adapter": (4, 8)}
FROZEN = ("w", "bias")
ADAPTIVE = replace(PRESETS["fcdp"], cache=Cache.ADAPTIVE)
STRATEGIES = [*PRESETS.values(), ADAPTIVE]


@dataclass(frozen=True)
class Layers:
    """Two alike layers in two books with equal decisions: `first` is planned, `second` is not."""

    context: PassContext
    room: Room
    unplanned: Mapping[Direction, GraphModule]
    books: tuple[BucketBook, BucketBook]
    first: Planned
    graphs: Mapping[Direction, GraphModule]

    @property
    def keys(self) -> dict[str, str]:
        return {key_of(f"a.{n}"): key_of(f"b.{n}") for n in SHAPES}


def _plan(
    graphs: Mapping[Direction, GraphModule],
    book: BucketBook,
    room: Room,
    ctx: PassContext,
    number: int,
) -> Planned:
    return plan_graphs(graphs, book, room, ctx, number=number, num_fwd_outputs=1)


def _layers(
    strategy: Strategy,
    *,
    where: Where | None = None,
    bucket_bytes: int = 64,
    host_bytes: int | None = None,
    capacity_bytes: int | None = None,
) -> Layers:
    where = where or Where()
    mine = make_specs({f"a.{n}": s for n, s in SHAPES.items()}, where)
    specs = make_specs({f"{layer}.{n}": s for layer in "ab" for n, s in SHAPES.items()}, where)
    frozen = [f"{layer}.{n}" for layer in "ab" for n in FROZEN]
    ctx = make_context(
        specs,
        where,
        strategy=strategy,
        frozen=frozen,
        bucket_bytes=bucket_bytes,
        host_bytes=host_bytes,
    )
    mine = {k: ctx.specs[k] for k in mine}
    graphs = {
        Direction.FORWARD: toy_forward(mine),
        Direction.BACKWARD: toy_backward(mine, frozen=frozen),
    }
    unplanned = {d: clone(gm) for d, gm in graphs.items()}
    room = Room(capacity_bytes=capacity_bytes, threshold=1.0)
    books = BucketBook(ctx.specs), BucketBook(ctx.specs)
    planned = [_plan({d: clone(gm) for d, gm in graphs.items()}, books[1], room, ctx, 0)]
    planned.append(_plan(graphs, books[0], room, ctx, 0))
    assert planned[0].plan == planned[1].plan
    return Layers(
        context=ctx, room=room, unplanned=unplanned, books=books, first=planned[1], graphs=graphs
    )


def _by_passes(layers: Layers) -> tuple[Planned, dict[Direction, GraphModule]]:
    graphs = {d: renamed(gm, layers.keys) for d, gm in layers.unplanned.items()}
    return _plan(graphs, layers.books[1], layers.room, layers.context, 1), graphs


def _text(gm: GraphModule) -> list[tuple[str, str, str]]:
    return [(n.op, str(n.target), str((n.args, n.kwargs))) for n in gm.graph.nodes]


def _alike(layers: Layers, frozen: tuple[str, ...] = FROZEN) -> tuple[Planned, Counterparts] | None:
    budget = layers.context.host_budget
    return plan_alike(
        layers.first,
        layers.keys,
        layers.books[0],
        layers.room,
        {key_of(f"b.{n}") for n in frozen},
        number=1,
        host_bytes=None if budget is None else budget.bytes,
    )


@pytest.mark.parametrize(
    "where", quick([Where(), Where(ranks_per_node=1), Where(nodes=1)], Where())
)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_the_same_plan_and_graphs_as_by_the_passes(
    strategy: Strategy, where: Where, bucket_bytes: int
) -> None:
    layers = _layers(strategy, where=where, bucket_bytes=bucket_bytes)
    expected, graphs = _by_passes(layers)
    alike = _alike(layers)
    assert alike is not None
    found, others = alike
    assert found.plan == expected.plan
    assert found.plan != layers.first.plan
    assert found.wanting == expected.wanting
    assert found.lowered.graphs.keys() == expected.lowered.graphs.keys()
    for key, gm in found.lowered.graphs.items():
        assert _text(gm) == _text(expected.lowered.graphs[key])
    ours, theirs = layers.books
    assert ours.host_bytes == theirs.host_bytes
    assert ours.device_bytes_of_others([]) == theirs.device_bytes_of_others([])
    backward = others.graph(layers.graphs[Direction.BACKWARD])
    assert _text(backward) == _text(graphs[Direction.BACKWARD])
    accumulated = [
        plan_accumulation(planned.plan, gm, book, planned.backward)
        for book, planned, gm in (
            (layers.books[0], found, backward),
            (layers.books[1], expected, graphs[Direction.BACKWARD]),
        )
        if planned.backward is not None
    ]
    assert accumulated[0][0] == accumulated[1][0]
    for key, gm in accumulated[0][1].items():
        assert _text(gm) == _text(accumulated[1][1][key])


@settings(max_examples=20)
@given(host_bytes=st.integers(0, 2000), capacity_bytes=st.integers(0, 20_000))
def test_the_same_placements_or_none(host_bytes: int, capacity_bytes: int) -> None:
    layers = _layers(ADAPTIVE, host_bytes=host_bytes, capacity_bytes=capacity_bytes)
    found = _alike(layers)
    expected, _ = _by_passes(layers)
    kept = {p.is_cached for p in expected.plan.placements}
    assert (found is None) == (kept != {True})
    if found is not None:
        assert found[0].plan == expected.plan


def test_the_passes_plan_what_is_not_alike_after_all() -> None:
    layers = _layers(PRESETS["fcdp"])
    assert _alike(layers, frozen=("w",)) is None, "unfrozen"
    assert _alike(layers, frozen=(*FROZEN, "adapter")) is None, "frozen"
    assert _alike(layers) is not None
    assert _alike(layers) is None, "it has buckets now"
