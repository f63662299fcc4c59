"""The placement of accumulated gradients: on the GPU while there is room, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from builders_plan import make_bucket, make_placement
from fcdp_compile.passes.graph.context import Use
from fcdp_compile.passes.memory.place_gradients import (
    fit_gradients,
    place_gradients,
)
from fcdp_compile.plan import Bucket, Placement, Tier
from fcdp_compile.strategy import GradientOn, Scope, Strategy

N, G = 2, 4

Placed = tuple[Bucket, Placement]
FCDP, ZERO1, ZERO3 = (Strategy.parse(name) for name in ("fcdp", "zero1", "zero3"))


def made(number: int, elements: int, *, reduces: tuple[str, int] = ("bfloat16", 2)) -> Bucket:
    """A bucket with `elements` elements per slot, whose gradients may be on the GPU or the host."""
    bucket = make_bucket(number, [("w", (elements * N * G,))], nodes=N, ranks_per_node=G)
    dtype, itemsize = reduces
    return replace(bucket, reduce_dtype=dtype, reduce_itemsize=itemsize)


def place(
    placed: Sequence[Placed], room_bytes: int | None, strategy: Strategy = FCDP
) -> list[Tier]:
    buckets = [replace(b, strategy=strategy) for b, _ in placed]
    before = {p.bucket: p for _, p in placed}
    after = place_gradients(buckets, before, room_bytes=room_bytes)
    assert {
        i: replace(p, gradient_tier=before[i].gradient_tier) for i, p in after.items()
    } == before
    return [after[b.id].gradient_tier for b in buckets]


def fits(placed: Sequence[Placed], host_bytes: int) -> list[bool]:
    return fit_gradients([Use(bucket=b, placement=p) for b, p in placed], host_bytes=host_bytes)


def waiting(tier: Tier, *buckets: Bucket) -> list[Placed]:
    return [(b, make_placement(b, gradient_tier=tier)) for b in buckets]


@pytest.mark.parametrize(
    ("reduces", "itemsize"), [(("bfloat16", 2), 4), (("float32", 4), 4), (("float64", 8), 8)]
)
def test_bytes_are_of_sums_in_fp32_or_wider(reduces: tuple[str, int], itemsize: int) -> None:
    bucket = made(0, 3, reduces=reduces)
    assert bucket.waiting_gradient_bytes == 3 * N * itemsize
    assert replace(bucket, strategy=ZERO1).waiting_gradient_bytes == 3 * N * G * itemsize


BUCKETS = [made(0, 10), made(1, 30), made(2, 5)]
PLACED = [(b, make_placement(b)) for b in BUCKETS]
SIZES = [80, 240, 40]  # fp32 sums of node shards


@pytest.mark.parametrize(
    ("room_bytes", "expected"),
    [
        (None, "ggg"),
        (sum(SIZES), "ggg"),
        (sum(SIZES) - 1, "ggh"),
        (80 + 240 - 1, "ghg"),  # a later bucket that fits takes the rest of the room
        (120, "ghg"),
        (119, "ghh"),
        (40, "hhg"),
        (0, "hhh"),
    ],
)
def test_in_order_while_there_is_room(room_bytes: int | None, expected: str) -> None:
    tiers = {"g": Tier.GPU, "h": Tier.HOST}
    assert place(PLACED, room_bytes) == [tiers[letter] for letter in expected]


def test_whole_gradients_take_more_room() -> None:
    whole = replace(FCDP, gradient=Scope.NONE)
    assert place(PLACED, G * sum(SIZES), whole) == [Tier.GPU] * 3
    assert place(PLACED, G * sum(SIZES) - 1, whole) == [Tier.GPU, Tier.GPU, Tier.HOST]


@pytest.mark.parametrize("room_bytes", [None, 0])
@pytest.mark.parametrize("on", [GradientOn.GPU, GradientOn.HOST])
def test_what_was_asked_for_stays(on: GradientOn, room_bytes: int | None) -> None:
    tier = {GradientOn.GPU: Tier.GPU, GradientOn.HOST: Tier.HOST}[on]
    placed = waiting(tier, *BUCKETS)
    assert place(placed, room_bytes, replace(FCDP, gradient_on=on)) == [tier] * 3


def test_gradients_that_do_not_wait_have_no_place_and_take_no_room() -> None:
    none = waiting(Tier.NONE, BUCKETS[1])
    assert place([PLACED[0], *none, PLACED[2]], 120) == [Tier.GPU, Tier.NONE, Tier.GPU]
    assert place(none, None, ZERO3) == [Tier.NONE]


@pytest.mark.parametrize(
    ("host_bytes", "expected"),
    [(sum(SIZES), "hhh"), (sum(SIZES) - 1, "hh-"), (120, "h-h"), (40, "--h"), (0, "---")],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_what_host_memory_has_no_room_for_never_waits(
    host_bytes: int, expected: str, gpu: bool
) -> None:
    """On every rank alike, however much room one rank has on its GPU."""
    placed = waiting(Tier.GPU, *BUCKETS) if gpu else PLACED
    assert fits(placed, host_bytes) == [letter == "h" for letter in expected]
    assert fits(waiting(Tier.NONE, *BUCKETS), sum(SIZES)) == [False] * 3


@pytest.mark.parametrize("strategy", [ZERO1, replace(FCDP, gradient_on=GradientOn.GPU)])
def test_gradients_that_wait_on_the_gpu_alone_need_no_host_memory(strategy: Strategy) -> None:
    assert fits([(replace(b, strategy=strategy), p) for b, p in PLACED], 0) == [True] * 3


def test_gradients_that_have_no_choice_take_room_from_those_that_have() -> None:
    """Modules of one model may have different strategies."""
    mixed = [BUCKETS[0], replace(BUCKETS[1], strategy=ZERO1), BUCKETS[2]]
    before = {p.bucket: p for _, p in PLACED}
    before[1] = replace(before[1], gradient_tier=Tier.GPU)
    taken = mixed[1].waiting_gradient_bytes
    for left, expected in ((120, [Tier.GPU, Tier.GPU]), (79, [Tier.HOST, Tier.GPU])):
        placed = place_gradients(mixed, before, room_bytes=taken + left)
        assert [placed[i].gradient_tier for i in (0, 2)] == expected
    placed = place_gradients(mixed, before, room_bytes=taken - 1)
    assert [p.gradient_tier for p in placed.values()] == [Tier.HOST, Tier.GPU, Tier.HOST]
