"""How each graph gets a bucket: the whole table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders_graph import (
    GraphBuilder,
    Where,
    calls,
    key_of,
    make_context,
    make_specs,
    toy_forward,
)
from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.bucket import bucket
from fcdp_compile.passes.choose_sources import choose_sources
from fcdp_compile.passes.graph.context import META, Source, use_of
from fcdp_compile.plan import Direction, Variant

WHERE = Where()
SHAPES = {"a": (4,), "frozen": (4,)}
FORWARD, BACKWARD, INFERENCE = Direction.FORWARD, Direction.BACKWARD, Direction.INFERENCE
COLD, WARM = Variant.COLD, Variant.WARM
HOME, GATHER, STORE, LOAD = (
    Source.HOME,
    Source.GATHER,
    Source.GATHER_AND_STORE,
    Source.LOAD,
)


def sources(strategy: str, where: Where = WHERE, **more) -> list[Source | None]:
    """The sources of the trainable and of the frozen parameter."""
    specs = make_specs(SHAPES, where)
    ctx = make_context(specs, where, strategy=strategy, frozen=["frozen"], **more)
    # A backward's buckets are its forward's.
    gm = choose_sources(bucket(toy_forward(specs), replace(ctx, direction=FORWARD)), ctx)
    return [use_of(n).source for n in calls(gm, UNSHARD)]


@pytest.mark.parametrize(
    ("strategy", "direction", "variant", "expected"),
    [
        ("zero3", FORWARD, COLD, [GATHER, GATHER]),
        ("zero3", BACKWARD, COLD, [GATHER, GATHER]),
        ("zero3", INFERENCE, COLD, [GATHER, GATHER]),
        ("zero++", FORWARD, COLD, [STORE, STORE]),
        ("zero++", BACKWARD, COLD, [LOAD, LOAD]),
        ("fcdp", FORWARD, COLD, [STORE, LOAD]),
        ("fcdp", FORWARD, WARM, [LOAD, LOAD]),
        ("fcdp", BACKWARD, COLD, [LOAD, LOAD]),
        ("fcdp", INFERENCE, COLD, [STORE, LOAD]),
        ("fcdp", INFERENCE, WARM, [LOAD, LOAD]),
    ],
)
def test_table(
    strategy: str, direction: Direction, variant: Variant, expected: list[Source]
) -> None:
    more = {"direction": direction, "variant": variant, "backward_buckets": (0, 1)}
    assert sources(strategy, **more) == expected


@pytest.mark.parametrize(
    ("direction", "variant"),
    [(FORWARD, COLD), (FORWARD, WARM), (BACKWARD, COLD), (INFERENCE, WARM)],
)
@pytest.mark.parametrize(("host_bytes", "cached"), [(0, 0), (8, 1), (16, 2)])
def test_what_has_no_place_on_the_host_is_gathered_at_every_use(
    direction: Direction, variant: Variant, host_bytes: int, cached: int
) -> None:
    """Trainable or frozen."""
    more = {"direction": direction, "variant": variant, "backward_buckets": (0, 1)}
    kept = sources("fcdp", **more)
    assert GATHER not in kept
    assert sources("fcdp", host_bytes=host_bytes, **more) == kept[:cached] + [GATHER] * (2 - cached)


def test_what_no_backward_wants_is_not_stored_until_then() -> None:
    assert sources("zero++", backward_buckets=()) == [GATHER, GATHER]
    assert sources("zero++", backward_buckets=(1,)) == [GATHER, STORE]
    assert sources("zero++", direction=INFERENCE) == [GATHER, GATHER]


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("variant", list(Variant))
def test_one_node_has_nothing_between_nodes(
    strategy: str, direction: Direction, variant: Variant
) -> None:
    where = Where(nodes=1, ranks_per_node=3)
    more = {"direction": direction, "variant": variant, "backward_buckets": (0, 1)}
    frozen = LOAD if strategy == "fcdp" else HOME  # its home shard waits on the host
    assert sources(strategy, where, **more) == [HOME, frozen]


def test_what_has_no_place_on_the_host_stays_at_home_on_one_node() -> None:
    where = Where(nodes=1, ranks_per_node=2)
    assert sources("fcdp", where, host_bytes=8) == [HOME, LOAD]
    assert sources("fcdp", where, host_bytes=7) == [HOME, HOME]


def test_a_bucket_of_which_a_part_is_absent_is_loaded() -> None:
    specs = make_specs({"a": (4,), "b": (4,)}, WHERE)
    ctx = make_context(specs, WHERE)
    whole = choose_sources(bucket(toy_forward(specs), ctx), ctx)
    first = use_of(calls(whole, UNSHARD)[0])
    known = {key_of(n): (first.bucket,) for n in "ab"}
    ctx = replace(ctx, known=known, placements={0: first.placement}, next_bucket=1)
    part = choose_sources(bucket(toy_forward(specs, uses=["b"]), ctx), ctx)
    (use,) = [use_of(n) for n in calls(part, UNSHARD)]
    assert use.bucket == first.bucket
    assert (first.source, use.source) == (STORE, LOAD)


def test_only_records_change() -> None:
    specs = make_specs(SHAPES, WHERE)
    ctx = make_context(specs, WHERE)
    gm = bucket(toy_forward(specs), ctx)
    before, buckets = str(gm.graph), [use_of(n).bucket for n in calls(gm, UNSHARD)]
    assert choose_sources(gm, ctx) is gm
    assert str(gm.graph) == before
    assert [use_of(n).bucket for n in calls(gm, UNSHARD)] == buckets
    assert [n for n in gm.graph.nodes if META in n.meta] == calls(gm, UNSHARD)


def test_a_graph_without_parameters_stays_as_it_is() -> None:
    b = GraphBuilder({})
    gm = b.finish(b.input("x"))
    before = str(gm.graph)
    assert str(choose_sources(gm, make_context({}, WHERE)).graph) == before


def test_buckets_must_be_known() -> None:
    specs = make_specs(SHAPES, WHERE)
    with pytest.raises(AssertionError, match="run `bucket` first"):
        choose_sources(toy_forward(specs), make_context(specs, WHERE))
