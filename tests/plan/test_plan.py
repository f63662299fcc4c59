"""Ranks compare digests of plans, and print the difference if digests do not match."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from builders_plan import (
    make_bucket,
    make_plan,
    make_steps,
    plans,
    with_buckets,
    with_placements,
)
from fcdp_compile.plan import Bucket, Kind, Plan, Schedule, Step, Tier, Variant
from fcdp_compile.plan.diff import diff
from fcdp_compile.strategy import PRESETS, Algorithm
from fcdp_compile.strategy.formats import Format


def with_bucket(plan: Plan, **changes: Any) -> Plan:
    """The plan with its last bucket changed."""
    bucket = dataclasses.replace(plan.buckets[-1], **changes)
    buckets = (*plan.buckets[:-1], bucket)
    *others, last = plan.placements
    placements = (*others, dataclasses.replace(last, bucket=bucket.id))
    return dataclasses.replace(plan, buckets=buckets, placements=placements)


def with_steps(plan: Plan, change: Callable[[tuple[Step, ...]], tuple[Step, ...]]) -> Plan:
    """The plan with the steps of its first schedule changed, and numbered anew."""
    first = plan.schedules[0]
    numbered = tuple(
        dataclasses.replace(step, index=i) for i, step in enumerate(change(first.steps))
    )
    first = dataclasses.replace(first, steps=numbered)
    return dataclasses.replace(plan, schedules=(first, *plan.schedules[1:]))


def with_step(plan: Plan, index: int, **changes: Any) -> Plan:
    """The plan with one step of its first schedule changed."""
    return with_steps(
        plan,
        lambda steps: tuple(
            dataclasses.replace(s, **changes) if s.index == index else s for s in steps
        ),
    )


def with_param(plan: Plan, **changes: Any) -> Plan:
    """The plan with the first parameter of its last bucket changed."""
    first, *others = plan.buckets[-1].params
    return with_bucket(plan, params=(dataclasses.replace(first, **changes), *others))


PLAN = make_plan()
FROZEN, ADAPTERS = PLAN.buckets
COMPUTE = next(s.index for s in PLAN.schedules[0].steps if s.kind is Kind.COMPUTE)
STORE = next(s.index for s in PLAN.schedules[0].steps if s.kind is Kind.STORE)

SAME: dict[str, Plan] = {
    "graph number": dataclasses.replace(PLAN, graph=7),
    "predicted peak": dataclasses.replace(PLAN, peak_bytes=7),
    "memory limit": dataclasses.replace(PLAN, memory_limit_bytes=7),
    "host or gpu": with_placements(PLAN, tier=Tier.GPU),
    "why": with_placements(PLAN, why="another reason"),
    "bytes of a store": with_step(PLAN, STORE, bytes=0),
    "label": with_step(PLAN, 0, label="something else"),
    "label of compute": with_step(PLAN, COMPUTE, label="something else"),
    "less compute": with_steps(PLAN, lambda s: tuple(x for x in s if x.kind is not Kind.COMPUTE)),
    "more compute": with_steps(
        PLAN, lambda steps: (*make_steps([(Kind.COMPUTE, None, 0)] * 3), *steps)
    ),
}

OTHER: dict[str, Plan] = {
    "strategy": dataclasses.replace(PLAN, strategy="zero3"),
    "nodes": dataclasses.replace(PLAN, nodes=3),
    "ranks per node": dataclasses.replace(PLAN, ranks_per_node=3),
    "strategy of a bucket": with_bucket(PLAN, strategy=PRESETS["zero3"]),
    "refresh": dataclasses.replace(PLAN, refresh=()),
    "order of refresh": dataclasses.replace(PLAN, refresh=(1, 0)),
    "bucket missing": with_buckets(PLAN, *PLAN.buckets[:1]),
    "bucket more": with_buckets(PLAN, *PLAN.buckets, make_bucket(2, [("head.weight", (8, 8))])),
    "order of buckets": with_buckets(PLAN, *PLAN.buckets[::-1]),
    "bucket id": with_bucket(PLAN, id=5),
    "dtype": with_bucket(PLAN, dtype="float16"),
    "itemsize": with_bucket(PLAN, itemsize=4),
    "reduce dtype": with_bucket(PLAN, reduce_dtype="bfloat16"),
    "reduce itemsize": with_bucket(PLAN, reduce_itemsize=2),
    "frozen": with_bucket(PLAN, frozen=True),
    "tier": with_placements(PLAN, bucket=1, tier=Tier.NONE),
    "gradient tier": with_placements(PLAN, bucket=1, gradient_tier=Tier.NONE),
    "wire": with_bucket(PLAN, wire=Format.INT8),
    "reduce wire": with_bucket(PLAN, reduce_wire=Format.INT4),
    "host format": with_bucket(PLAN, host_format=Format.INT8),
    "algorithm": with_bucket(PLAN, algorithm=Algorithm.HO_RING),
    "member missing": with_bucket(PLAN, params=ADAPTERS.params[:-1]),
    "member name": with_param(PLAN, name="renamed"),
    "member offset": with_param(PLAN, offset=1),
    "member dimension": with_param(
        PLAN, layout=dataclasses.replace(ADAPTERS.params[0].layout, dim=1)
    ),
    "order of members": with_bucket(PLAN, params=ADAPTERS.params[::-1]),
    "schedule missing": dataclasses.replace(PLAN, schedules=PLAN.schedules[:-1]),
    "order of schedules": dataclasses.replace(PLAN, schedules=PLAN.schedules[::-1]),
    "variant": dataclasses.replace(
        PLAN,
        schedules=(
            *PLAN.schedules[:-1],
            dataclasses.replace(PLAN.schedules[-1], variant=Variant.COLD),
        ),
    ),
    "step missing": with_steps(PLAN, lambda steps: steps[1:]),
    "order of steps": with_steps(PLAN, lambda steps: (steps[1], steps[0], *steps[2:])),
    "bytes of a step": with_step(PLAN, 0, bytes=1),
    "bucket of a step": with_step(PLAN, 0, bucket=0),
    "kind of a step": with_step(PLAN, 0, kind=Kind.INTRA_ALL_GATHER),
}


@pytest.mark.parametrize("name", SAME)
def test_digest_ignores_what_ranks_may_disagree_on(name: str) -> None:
    assert SAME[name] != PLAN
    assert SAME[name].digest() == PLAN.digest()
    assert diff(PLAN, SAME[name]) == []


@pytest.mark.parametrize("name", OTHER)
def test_digest_and_difference_notice_everything_else(name: str) -> None:
    assert OTHER[name].digest() != PLAN.digest()
    lines = diff(PLAN, OTHER[name])
    assert 0 < len(lines) < 20
    assert all(line.isprintable() and len(line) < 300 for line in lines)


def test_the_changes_cover_every_field_of_a_bucket_and_a_plan() -> None:
    """A new field of the plan must be added above, or declared as a field that may differ between ranks."""

    def changed(cls: type, pairs: list[tuple[object, object]]) -> set[str]:
        names = [f.name for f in dataclasses.fields(cls)]
        return {n for n in names for x, y in pairs if getattr(x, n) != getattr(y, n)}

    others = list(OTHER.values())
    buckets: list[tuple[object, object]] = [(ADAPTERS, p.buckets[-1]) for p in others]
    assert changed(Bucket, buckets) == {f.name for f in dataclasses.fields(Bucket)}
    whole: list[tuple[object, object]] = [(PLAN, p) for p in others]
    assert changed(Plan, whole) == {f.name for f in dataclasses.fields(Plan)} - {
        "graph",
        "peak_bytes",
        "memory_limit_bytes",
    }


@given(plans(), plans())
def test_there_is_a_difference_exactly_where_digests_differ(a: Plan, b: Plan) -> None:
    assert (diff(a, b) == []) == (a.digest() == b.digest())


def test_digest_is_the_same_for_an_equal_plan() -> None:
    assert make_plan().digest() == PLAN.digest()


def test_difference_names_the_sides_and_the_steps() -> None:
    names = ("rank 0", "rank 3")
    (line,) = diff(PLAN, OTHER["bytes of a step"], names=names)
    size_bytes = PLAN.schedules[0].steps[0].bytes
    assert line == (
        f"forward cold: rank 0 step 0 inter_all_gather of bucket 1, {size_bytes} bytes; "
        "rank 3 step 0 inter_all_gather of bucket 1, 1 bytes"
    )


def test_difference_shows_values_of_a_bucket() -> None:
    assert diff(PLAN, OTHER["tier"]) == ["bucket 1 tier: first host (kept); second none (kept)"]
    lines = diff(PLAN, OTHER["member missing"])
    name = ADAPTERS.params[-1].name
    assert f"only first has bucket 1 parameter {name}" in lines
    assert any(line.startswith("bucket 1 slot_bytes: ") for line in lines)


def test_difference_of_two_big_strangers_stays_short() -> None:
    other = dataclasses.replace(make_plan(layers=400, width=64), strategy="zero3")
    long = with_steps(other, lambda steps: steps * 400)
    assert len(diff(PLAN, long)) < 40


def test_bytes_by_kind_adds_up_and_leaves_out_what_moves_nothing() -> None:
    cold = PLAN.schedules[0]
    assert cold.bytes_by_kind() == {
        Kind.INTER_ALL_GATHER: ADAPTERS.slot_bytes,
        Kind.STORE: 2 * ADAPTERS.slot_bytes,
        Kind.LOAD: 2 * FROZEN.slot_bytes,
        Kind.INTRA_ALL_GATHER: 2 * FROZEN.slot_bytes,
    }
    twice = Schedule(
        direction=cold.direction, variant=cold.variant, steps=(*cold.steps, *cold.steps)
    )
    assert twice.bytes_by_kind() == {k: 2 * v for k, v in cold.bytes_by_kind().items()}


def test_bytes_of_a_bucket() -> None:
    bucket = make_bucket(0, [("a", (3,)), ("b", ()), ("c", (8, 4))], dtype=("float32", 4))
    assert bucket.slot_elements == 1 + 1 + 8
    assert bucket.slot_bytes == 40
    assert bucket.node_bytes == 80
    assert bucket.full_bytes == 160


def test_a_bucket_is_found_by_its_number() -> None:
    assert PLAN.bucket(1) is ADAPTERS
    with pytest.raises(KeyError, match="no bucket 2"):
        PLAN.bucket(2)
