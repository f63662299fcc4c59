"""The graphs of a step as one plan: the same steps, in the order in which the runtime starts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from builders_graph import Where, lower_toy
from builders_plan import make_bucket, make_plan, make_steps, plans, with_buckets
from fcdp_compile.passes.describe import describe
from fcdp_compile.plan import Bucket, Direction, Kind, Lane, Plan, Schedule, Step, Variant
from fcdp_compile.plan.cost import Link, Machine
from fcdp_compile.plan.whole_step import drain_begins, of_one_step, whole_step
from fcdp_compile.runtime.program import drain
from fcdp_compile.tools.simulator import simulate

MACHINE = Machine(
    inter=Link(latency_s=0.0, bytes_per_s=1e6),
    intra=Link(latency_s=0.0, bytes_per_s=1e9),
    h2d=Link(latency_s=0.0, bytes_per_s=1e9),
    d2h=Link(latency_s=0.0, bytes_per_s=1e9),
    flops_per_s=1e6,
    memory_bytes_per_s=1e12,
)

FORWARD = (
    Kind.INTER_ALL_GATHER,
    Kind.INTRA_ALL_GATHER,
    Kind.WAIT,
    Kind.COMPUTE,
    Kind.FREE,
)
BACKWARD = (
    Kind.LOAD,
    Kind.INTRA_ALL_GATHER,
    Kind.WAIT,
    Kind.COMPUTE,
    Kind.INTRA_REDUCE_SCATTER,
    Kind.INTER_REDUCE_SCATTER,
    Kind.WAIT,
    Kind.COMPUTE,
)


def layer(number: int) -> Plan:
    """A graph of one layer, whose forward and backward each wait for the step before in every step."""
    bucket = make_bucket(number, [(f"layers.{number}.weight", (64, 64))], dtype=("float32", 4))
    return with_buckets(
        make_plan(graph=number),
        bucket,
        refresh=(),
        schedules=tuple(
            Schedule(
                direction=direction,
                variant=Variant.COLD,
                steps=steps(kinds, bucket),
                memory_bytes=(100,) * len(kinds),
            )
            for direction, kinds in ((Direction.FORWARD, FORWARD), (Direction.BACKWARD, BACKWARD))
        ),
    )


def steps(kinds: Sequence[Kind], bucket: Bucket) -> tuple[Step, ...]:
    entries = [
        (k, None if k is Kind.COMPUTE else bucket.id, 0 if k is Kind.WAIT else bucket.slot_bytes)
        for k in kinds
    ]
    made = make_steps(entries, label=str(bucket.id))
    return tuple(replace(s, flops=5000 * (s.kind is Kind.COMPUTE)) for s in made)


def shown(schedule: Schedule) -> str:
    letters = {Kind.WAIT: "w", Kind.COMPUTE: "c", Kind.FREE: "f"}
    return " ".join(letters.get(s.kind, s.kind.name) + s.label for s in schedule.steps)


def test_the_first_transfers_start_in_the_graph_before() -> None:
    forward, _ = whole_step([layer(i) for i in range(2)]).schedules
    assert shown(forward) == (
        "INTER_ALL_GATHER0 INTRA_ALL_GATHER0 INTER_ALL_GATHER1 INTRA_ALL_GATHER1 w0 c0 f0 w1 c1 f1"
    )


def test_reductions_end_in_the_graph_after() -> None:
    _, backward = whole_step([layer(i) for i in range(2)]).schedules
    assert shown(backward) == (
        "LOAD1 INTRA_ALL_GATHER1 LOAD0 INTRA_ALL_GATHER0 w1 c1 INTRA_REDUCE_SCATTER1 INTER_REDUCE_SCATTER1 "
        "w0 c0 INTRA_REDUCE_SCATTER0 INTER_REDUCE_SCATTER0 w1 c1 w0 c0"
    )


def test_what_crosses_a_seam_is_counted_in_memory() -> None:
    plan = whole_step([layer(i) for i in range(2)])
    forward, backward = plan.schedules
    full, node = plan.buckets[0].full_bytes, plan.buckets[0].node_bytes
    assert forward.memory_bytes[4:7] == (100 + full + node,) * 3
    assert forward.memory_bytes[7:] == (100,) * 3
    assert backward.memory_bytes[8:12] == (100 + full,) * 4  # gradients of the layer before
    assert plan.peak_bytes == max(*forward.memory_bytes, *backward.memory_bytes)


def test_a_step_takes_less_time_than_its_graphs_one_after_the_other() -> None:
    layers = [layer(i) for i in range(4)]
    for schedule in whole_step(layers).schedules:
        alone = [
            simulate(s, MACHINE, 2).total_s
            for plan in layers
            for s in plan.schedules
            if s.direction is schedule.direction
        ]
        together = simulate(schedule, MACHINE, 2)
        assert together.total_s < 0.9 * sum(alone)
        assert together.total_s >= max(together.busy_s[Lane.INTER], together.busy_s[Lane.COMPUTE])


@given(st.lists(plans(), min_size=1, max_size=3))
def test_steps_are_those_of_the_plans_and_wait_for_earlier_steps(made: list[Plan]) -> None:
    for number, plan in enumerate(made):  # numbers of buckets are those of one model
        renumbered = [replace(b, id=b.id + 100 * number) for b in plan.buckets]
        made[number] = replace(
            with_buckets(plan, *renumbered),
            refresh=(),
            schedules=tuple(
                replace(
                    s,
                    steps=tuple(
                        replace(
                            step, bucket=None if step.bucket is None else step.bucket + 100 * number
                        )
                        for step in s.steps
                    ),
                )
                for s in plan.schedules
            ),
        )

    def has_forward(*of: Plan) -> bool:
        return any(s.direction is Direction.FORWARD for plan in of for s in plan.schedules)

    def counts_as(schedule: Schedule, plan: Plan) -> Direction:
        is_inference = schedule.direction is Direction.INFERENCE
        is_forward = is_inference and has_forward(*made) and not has_forward(plan)
        return Direction.FORWARD if is_forward else schedule.direction

    for schedule in whole_step(made).schedules:
        parts = [
            s for plan in made for s in plan.schedules if counts_as(s, plan) is schedule.direction
        ]
        assert [s.index for s in schedule.steps] == list(range(len(schedule.steps)))
        assert all(w < s.index for s in schedule.steps for w in s.waits)
        found = Counter((s.kind, s.bucket, s.bytes, s.label) for s in schedule.steps)
        whole = Counter((s.kind, s.bucket, s.bytes, s.label) for p in parts for s in p.steps)
        assert found <= whole


@pytest.mark.parametrize("strategy", ["fcdp", "zero3", "mics"])
def test_the_drain_of_a_plan_is_that_of_the_graph(strategy: str) -> None:
    made = lower_toy(
        {"w": (8, 4), "b": (4,)}, Where(), strategy=strategy, scheduled=True, segmented=True
    )
    key = Direction.BACKWARD, Variant.COLD
    found = describe(made.graphs[key], made.contexts[key]).steps
    first = drain_begins([s.kind for s in found], [s.waits for s in found])
    nodes = drain(list(made.graphs[key].graph.nodes))
    assert first < len(found)
    assert [s.kind.value for s in found[first:]] == [
        "compute" if n.op == "call_module" else n.target.__name__  # type: ignore[union-attr]
        for n in nodes
        if n.op == "call_module" or "getitem" not in n.name
    ]


def test_a_graph_in_which_nothing_is_trained_is_part_of_the_forward() -> None:
    frozen, trained = layer(0), layer(1)
    (only, _) = frozen.schedules
    frozen = replace(frozen, schedules=(replace(only, direction=Direction.INFERENCE),))
    forward, backward = whole_step([frozen, trained]).schedules
    assert (forward.direction, backward.direction) == (Direction.FORWARD, Direction.BACKWARD)
    assert {s.bucket for s in forward.steps} == {0, 1, None}
    assert {s.bucket for s in backward.steps} == {1, None}
    (evaluation,) = whole_step([frozen, frozen]).schedules
    assert evaluation.direction is Direction.INFERENCE


def test_a_graph_compiled_again_is_no_part_of_the_step() -> None:
    first, second = layer(0), layer(1)
    again = replace(layer(1), graph=7)
    assert of_one_step([first, second, again]) == [first, second]
