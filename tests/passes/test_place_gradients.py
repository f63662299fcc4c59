"""Where accumulated gradients wait: on the GPU while there is room, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from builders_plan import make_bucket
from fcdp_compile.passes.memory.place_gradients import (
    fit_gradients,
    gradient_bytes,
    place_gradients,
)
from fcdp_compile.plan import Bucket, Tier
from fcdp_compile.strategy import GradientOn, Strategy

N, G = 2, 4
FCDP, ZERO1, ZERO3 = (Strategy.parse(name) for name in ("fcdp", "zero1", "zero3"))


def made(number: int, elements: int, *, reduces: tuple[str, int] = ("bfloat16", 2)) -> Bucket:
    """A bucket of as many elements a slot, with gradients that may wait on either side."""
    bucket = make_bucket(number, [("w", (elements * N * G,))], nodes=N, ranks_per_node=G)
    dtype, itemsize = reduces
    return replace(bucket, reduce_dtype=dtype, reduce_itemsize=itemsize)


def place(
    buckets: Sequence[Bucket], room_bytes: int | None, strategy: Strategy = FCDP
) -> list[Tier]:
    buckets = [replace(b, strategy=strategy) for b in buckets]
    placed = place_gradients(buckets, room_bytes=room_bytes)
    assert [replace(b, gradient_tier=Tier.NONE) for b in placed] == [
        replace(b, gradient_tier=Tier.NONE) for b in buckets
    ]
    return [b.gradient_tier for b in placed]


@pytest.mark.parametrize(
    ("reduces", "itemsize"), [(("bfloat16", 2), 4), (("float32", 4), 4), (("float64", 8), 8)]
)
def test_bytes_are_of_sums_in_fp32_or_wider(reduces: tuple[str, int], itemsize: int) -> None:
    bucket = made(0, 3, reduces=reduces)
    assert gradient_bytes(bucket) == 3 * N * itemsize
    assert gradient_bytes(replace(bucket, strategy=ZERO1)) == 3 * N * G * itemsize


BUCKETS = [made(0, 10), made(1, 30), made(2, 5)]
SIZES = [80, 240, 40]  # fp32 sums of node shards


@pytest.mark.parametrize(
    ("room_bytes", "expected"),
    [
        (None, "ggg"),
        (sum(SIZES), "ggg"),
        (sum(SIZES) - 1, "ggh"),
        (80 + 240 - 1, "ghg"),  # a later one that fits takes what is left
        (120, "ghg"),
        (119, "ghh"),
        (40, "hhg"),
        (0, "hhh"),
    ],
)
def test_in_order_while_there_is_room(room_bytes: int | None, expected: str) -> None:
    tiers = {"g": Tier.GPU, "h": Tier.HOST}
    assert place(BUCKETS, room_bytes) == [tiers[letter] for letter in expected]


def test_whole_gradients_take_more_room() -> None:
    assert place(BUCKETS, G * sum(SIZES), ZERO1) == [Tier.GPU] * 3
    assert place(BUCKETS, G * sum(SIZES) - 1, ZERO1) == [Tier.GPU, Tier.GPU, Tier.HOST]


@pytest.mark.parametrize("room_bytes", [None, 0])
@pytest.mark.parametrize("on", [GradientOn.GPU, GradientOn.HOST])
def test_what_was_asked_for_stays(on: GradientOn, room_bytes: int | None) -> None:
    tier = {GradientOn.GPU: Tier.GPU, GradientOn.HOST: Tier.HOST}[on]
    buckets = [replace(b, gradient_tier=tier) for b in BUCKETS]
    assert place(buckets, room_bytes, replace(FCDP, gradient_on=on)) == [tier] * 3


def test_gradients_that_do_not_wait_have_no_place_and_take_no_room() -> None:
    none = replace(BUCKETS[1], gradient_tier=Tier.NONE)
    assert place([BUCKETS[0], none, BUCKETS[2]], 120) == [Tier.GPU, Tier.NONE, Tier.GPU]
    assert place([none], None, ZERO3) == [Tier.NONE]


@pytest.mark.parametrize(
    ("host_bytes", "expected"),
    [(sum(SIZES), "hhh"), (sum(SIZES) - 1, "hh-"), (120, "h-h"), (40, "--h"), (0, "---")],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_what_host_memory_has_no_room_for_never_waits(
    host_bytes: int, expected: str, gpu: bool
) -> None:
    """On every rank alike, whatever one has room for on its GPU."""
    buckets = [replace(b, gradient_tier=Tier.GPU) for b in BUCKETS] if gpu else BUCKETS
    found = fit_gradients(buckets, host_bytes=host_bytes)
    waits = [b.gradient_tier is not Tier.NONE for b in found]
    assert waits == [letter == "h" for letter in expected]
    frozen = [replace(b, gradient_tier=Tier.NONE, frozen=True) for b in BUCKETS]
    assert fit_gradients(frozen, host_bytes=0) == frozen


def test_gradients_that_wait_on_the_gpu_alone_need_no_host_memory() -> None:
    buckets = [replace(b, strategy=ZERO1) for b in BUCKETS]
    assert fit_gradients(buckets, host_bytes=0) == buckets


def test_gradients_that_have_no_choice_take_room_from_those_that_have() -> None:
    """Modules of one model may have other strategies."""
    mixed = [BUCKETS[0], replace(BUCKETS[1], strategy=ZERO1, gradient_tier=Tier.GPU), BUCKETS[2]]
    taken = gradient_bytes(mixed[1])
    for left, expected in ((120, [Tier.GPU, Tier.GPU]), (79, [Tier.HOST, Tier.GPU])):
        placed = place_gradients(mixed, room_bytes=taken + left)
        assert [b.gradient_tier for b in (placed[0], placed[2])] == expected
    placed = place_gradients(mixed, room_bytes=taken - 1)
    assert [b.gradient_tier for b in placed] == [Tier.HOST, Tier.GPU, Tier.HOST]
