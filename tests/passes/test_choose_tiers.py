"""Node shards kept on the device: never above the memory limit, and never fewer with more memory."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from builders_plan import make_bucket, make_placement, make_steps
from fcdp_compile.passes.memory.choose_tiers import Choices, Entry, choose_tiers, place_steps
from fcdp_compile.plan import Direction, Kind, Schedule, Tier, Variant


def entry(
    bucket: int,
    size: int,
    *spans: tuple[int, int],
    moved: int | None = None,
    full: int | None = None,
    spread: int = 0,
) -> Entry:
    return Entry(
        bucket=bucket,
        bytes=size,
        moved_bytes=2 * size if moved is None else moved,
        spans=spans,
        full_bytes=full,
        spread_bytes=spread,
    )


def kept(placement: Choices) -> list[int]:
    return [c.bucket for c in placement.choices if c.tier is not Tier.HOST]


def in_full(placement: Choices) -> list[int]:
    return [c.bucket for c in placement.choices if c.tier is Tier.GPU_FULL]


def choose(
    entries: list[Entry],
    alive: list[int],
    capacity: int | None,
    *,
    static: int = 0,
    tau: float = 1.0,
) -> Choices:
    return choose_tiers(entries, alive, static_bytes=static, capacity_bytes=capacity, threshold=tau)


def test_what_fits_stays() -> None:
    placement = choose([entry(0, 10, (0, 3)), entry(1, 20, (0, 3))], [5, 50, 5], 80)
    assert kept(placement) == [0, 1]
    assert placement.peak_bytes == 80
    assert [c.bucket for c in placement.choices] == [0, 1]
    assert all("stays on the gpu: peak" in c.why for c in placement.choices)


def test_an_entry_counts_only_while_it_is_there() -> None:
    alive = [0, 90, 0, 0]
    assert kept(choose([entry(0, 50, (2, 4))], alive, 100)) == [0]
    assert kept(choose([entry(0, 50, (0, 1), (2, 4))], alive, 100)) == [0]
    assert kept(choose([entry(0, 50, (1, 2))], alive, 100)) == []
    assert choose([entry(0, 50, (2, 4))], alive, 100).peak_bytes == 90


def test_short_lives_and_busy_buckets_come_first() -> None:
    """Of equal buckets, the one used last in the forward, and so first in the backward, comes first."""
    first, last = entry(0, 10, (0, 8)), entry(1, 10, (3, 5))
    assert kept(choose([first, last], [0] * 8, 19)) == [1]
    rare, often = entry(0, 10, (0, 4), moved=10), entry(1, 10, (0, 4), moved=30)
    assert kept(choose([rare, often], [0] * 4, 19)) == [1]
    assert kept(choose([entry(0, 10, (0, 4)), entry(1, 10, (0, 4))], [0] * 4, 19)) == [1]


def test_whole_buckets_stay_once_every_node_shard_does() -> None:
    entries = [entry(0, 10, (0, 2), full=5), entry(1, 20, (0, 2), full=1)]
    for capacity, shards, full in [
        (29, [1], []),
        (30, [0, 1], []),
        (31, [0, 1], [1]),
        (35, [0, 1], [1]),
        (36, [0, 1], [0, 1]),
    ]:
        placement = choose(entries, [0, 0], capacity)
        assert (kept(placement), in_full(placement)) == (shards, full)
    assert placement.peak_bytes == 36
    assert all("in full: peak" in c.why for c in placement.choices)
    (refused,) = [c.why for c in choose(entries, [0, 0], 35).choices if c.bucket == 0]
    assert refused.startswith("node shard stays on the gpu: with bucket 0 too the peak of")


def test_the_busiest_within_the_node_come_first_and_some_cannot() -> None:
    entries = [
        entry(0, 10, (0, 4), full=5, spread=10),
        entry(1, 10, (0, 4), full=5, spread=30),
        entry(2, 10, (0, 4)),
    ]
    assert in_full(choose(entries, [0] * 4, 35)) == [1]
    assert in_full(choose(entries, [0] * 4, 1000)) == [0, 1]


def test_nothing_fits() -> None:
    entries = [entry(0, 10, (0, 2)), entry(1, 20, (0, 2))]
    placement = choose(entries, [50, 60], 40, static=5)
    assert kept(placement) == []
    assert placement.peak_bytes == 65, "ZeRO-3's, above the limit or not"
    assert all("would exceed 0.0 MiB" in c.why for c in placement.choices)
    nowhere = choose(entries, [50, 60], None)
    assert kept(nowhere) == []
    assert all("no device memory" in c.why for c in nowhere.choices)


def test_no_entries_and_no_positions() -> None:
    assert choose([], [1, 2], 10) == Choices(choices=(), used_bytes=(1, 2))
    assert choose([], [], 10, static=3) == Choices(choices=(), used_bytes=(3,))


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1, float("nan")])
def test_a_threshold_is_a_part(threshold: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        choose([], [], 10, tau=threshold)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Entry], list[int], int]:
    """Entries, alive bytes and static bytes."""
    alive = draw(st.lists(st.integers(0, 100), min_size=1, max_size=12))
    cuts = st.tuples(st.integers(0, len(alive)), st.integers(0, len(alive))).map(sorted)
    entries = [
        Entry(
            bucket=i,
            bytes=draw(st.integers(0, 60)),
            moved_bytes=draw(st.integers(0, 200)),
            full_bytes=draw(st.none() | st.integers(0, 60)),
            spread_bytes=draw(st.integers(0, 200)),
            spans=tuple((a, b) for a, b in [draw(cuts)] if a < b),
        )
        for i in range(draw(st.integers(0, 6)))
    ]
    return entries, alive, draw(st.integers(0, 50))


def peak_of(
    entries: list[Entry], alive: list[int], static: int, chosen: set[int], full: set[int]
) -> int:
    """Compute the peak from scratch, position by position."""
    return max(
        static
        + size
        + sum(
            e.bytes + ((e.full_bytes or 0) if e.bucket in full else 0)
            for e in entries
            if e.bucket in chosen and any(a <= position < b for a, b in e.spans)
        )
        for position, size in enumerate(alive)
    )


@given(steps(), st.integers(0, 600), st.integers(0, 600), st.sampled_from([0.3, 0.9, 1.0]))
def test_limit_and_monotony(
    step: tuple[list[Entry], list[int], int], capacity: int, more: int, tau: float
) -> None:
    entries, alive, static = step
    placement = choose(entries, alive, capacity, static=static, tau=tau)
    chosen, full = set(kept(placement)), set(in_full(placement))
    assert placement.peak_bytes == peak_of(entries, alive, static, chosen, full)
    assert full <= chosen
    without = peak_of(entries, alive, static, set(), set())
    if without <= tau * capacity:
        assert placement.peak_bytes <= tau * capacity
    else:
        assert chosen == set(), "a cache on the device would only make it worse"
    larger = choose(entries, alive, capacity + more, static=static, tau=tau)
    assert chosen <= set(kept(larger))
    assert full <= set(in_full(larger))
    everything = choose(entries, alive, 10**6, static=static)
    assert set(kept(everything)) == {e.bucket for e in entries}
    assert set(in_full(everything)) == {e.bucket for e in entries if e.full_bytes is not None}


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.GPU, Tier.GPU_FULL])
def test_steps_that_move_nothing_have_no_bytes(tier: Tier) -> None:
    """A bucket that is kept whole is spread over the node only after a gather between nodes."""
    bucket = make_bucket(0, [("w", (8, 2))])
    kinds = {
        Variant.COLD: (Kind.INTER_ALL_GATHER, Kind.INTRA_ALL_GATHER, Kind.STORE),
        Variant.WARM: (Kind.LOAD, Kind.INTRA_ALL_GATHER),
    }
    stays = {
        Tier.HOST: set(),
        Tier.GPU: {(Variant.COLD, Kind.STORE), (Variant.WARM, Kind.LOAD)},
        Tier.GPU_FULL: {
            (Variant.COLD, Kind.STORE),
            (Variant.WARM, Kind.LOAD),
            (Variant.WARM, Kind.INTRA_ALL_GATHER),
        },
    }
    for variant, those in kinds.items():
        steps = make_steps([(kind, 0, 10) for kind in those])
        schedule = Schedule(direction=Direction.FORWARD, variant=variant, steps=steps)
        placed = place_steps(schedule, {0: make_placement(bucket, tier=tier)})
        found = {(variant, step.kind) for step in placed.steps if step.bytes == 0}
        assert found == {key for key in stays[tier] if key[0] is variant}
