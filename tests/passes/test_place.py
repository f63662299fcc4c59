"""How each graph gets a bucket: the whole table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builders_graph import (
    Where,
    bucketed,
    key_of,
    known_after,
    make_context,
    make_specs,
    sourced,
    toy_forward,
)
from fcdp_compile.passes.graph.context import Source
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
    uses = bucketed(toy_forward(specs), replace(ctx, direction=FORWARD)).uses
    return [use.source for use in sourced(replace(ctx, uses=uses)).uses.values()]


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
    whole = bucketed(toy_forward(specs), ctx)
    first = sourced(whole).uses[key_of("a")]
    ctx = replace(ctx, known=known_after(whole.uses), next_bucket=1)
    (use,) = sourced(bucketed(toy_forward(specs, uses=["b"]), ctx)).uses.values()
    assert use.bucket == first.bucket
    assert (first.source, use.source) == (STORE, LOAD)


def test_only_sources_are_new() -> None:
    specs = make_specs(SHAPES, WHERE)
    ctx = bucketed(toy_forward(specs), make_context(specs, WHERE))
    found = sourced(ctx).uses
    assert {key: replace(use, source=None) for key, use in found.items()} == ctx.uses
    assert list(found) == list(ctx.uses)
