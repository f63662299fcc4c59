"""Transfers start early, within the budget; `test_schedule_invariants` checks that nothing else changes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import pytest

from builders_graph import GraphBuilder, aten, calls, lower_toy, make_context
from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META
from fcdp_compile.passes.schedule import in_flight_bytes, schedule
from fcdp_compile.plan import Direction, Variant
from tests.passes.in_flight import peak
from tests.passes.schedule_checks import check
from tests.passes.scheduled import (
    BACKWARD,
    BOOKKEEPING,
    FORWARD,
    FOUR,
    GATHERS,
    GENEROUS,
    WHERE,
    Scheduled,
    W,
    four,
    is_compute,
    last_wait,
    users,
)


def order(done: Scheduled, *skipped: Callable[..., Any]) -> list[str]:
    """Explicit nodes as `kind bucket`, waits with their step's name, and `compute` for each run of it."""
    found: list[str] = []
    for node in done.after:
        if node.target in BOOKKEEPING or node.target in skipped:
            continue
        if node.target is ops.wait:
            kind = node.args[0].target
            if kind not in skipped:
                found.append(f"wait {kind.__name__} {node.kwargs['bucket']}")
        elif node.target in ops.EXPLICIT:
            found.append(f"{node.target.__name__} {node.kwargs['bucket']}")
        elif is_compute(node) and found[-1:] != ["compute"]:
            found.append("compute")
    return found


def just_in_time(buckets: Sequence[int]) -> list[str]:
    return [
        step
        for b in buckets
        for step in (
            f"inter_all_gather {b}",
            f"intra_all_gather {b}",
            f"wait intra_all_gather {b}",
            "compute",
            f"free {b}",
        )
    ]


def test_a_budget_for_nothing_more_is_just_in_time() -> None:
    forward = order(four(budget=1))
    assert [s for s in forward if s != "compute"] == [
        s for s in just_in_time(range(4)) if s != "compute"
    ]


def test_a_tight_backward_waits_for_a_reduction_when_the_next_one_starts() -> None:
    done = four(BACKWARD, budget=1)
    assert peak(done.after, done.ctx) == (W + W // 2) + (W + W // 2)
    steps = [s for s in order(done) if "reduce_scatter" in s]
    assert steps[:3] == [
        "intra_reduce_scatter 3",
        "inter_reduce_scatter 3",
        "wait intra_reduce_scatter 3",
    ]
    assert steps[3:6] == [
        "wait inter_reduce_scatter 3",
        "intra_reduce_scatter 2",
        "inter_reduce_scatter 2",
    ]


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
@pytest.mark.parametrize("key", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_a_generous_budget_starts_everything_at_the_first_cut(
    strategy: str, key: tuple[Direction, Variant]
) -> None:
    done = four(key, budget=GENEROUS, strategy=strategy)
    check(done)
    starts = [i for i, n in enumerate(done.after) if n.target in GATHERS]
    first = next(i for i, n in enumerate(done.after) if is_compute(n) or n.target is ops.wait)
    assert len(starts) == 8
    assert max(starts) < first
    reductions = calls(done.gm, ops.inter_reduce_scatter)
    waits = [u for r in reductions for u in r.users]
    at = {n: i for i, n in enumerate(done.after)}
    assert all(at[r] < at[w] for r, w in product(reductions, waits))  # gradients at the very end


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
@pytest.mark.parametrize("key", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_by_default_the_next_bucket_starts_before_compute_waits_for_this_one(
    strategy: str, key: tuple[Direction, Variant]
) -> None:
    done = four(key, strategy=strategy)
    check(done)
    at = {n: i for i, n in enumerate(done.after)}
    intra = calls(done.gm, ops.intra_all_gather)
    for this, following in pairwise(intra):
        assert at[following] < at[last_wait(this)]
    fetches = [n.all_input_nodes[0] for n in intra]
    for this, later in zip(intra, fetches[2:], strict=False):
        assert at[later] < at[last_wait(this)]  # node shards further ahead
    assert at[intra[2]] > at[last_wait(intra[0])]  # only one bucket ahead


def test_stores_run_beside_compute_and_are_waited_for_when_the_bucket_is_freed() -> None:
    done = four(strategy="fcdp")
    at = {n: i for i, n in enumerate(done.after)}
    for store in calls(done.gm, ops.store):
        (wait,) = store.users
        gather = last_wait(store.all_input_nodes[0])
        (free,) = users(gather, ops.free)
        between = done.after[at[gather] : at[wait]]
        assert at[store] < at[gather]
        assert any(is_compute(n) for n in between)
        assert at[free] == at[wait] + 1


def test_steps_say_how_early_they_are() -> None:
    labels = [n.meta[META].step.label for n in calls(four().gm, ops.intra_all_gather)]
    assert labels == ["1 cuts early", "1 cuts early", "1 cuts early", "1 cuts early"]
    tight = [n.meta[META].step.label for n in calls(four(budget=1).gm, ops.intra_all_gather)]
    assert set(tight) <= {"just in time", "1 cuts early"}


def test_a_graph_without_communication_is_left_alone() -> None:
    b = GraphBuilder({})
    gm = b.finish(b.call(aten.relu.default, b.input("x", (2,))))
    ctx = make_context({}, WHERE)
    before = str(gm.graph)
    assert str(schedule(gm, ctx).graph) == before
    assert in_flight_bytes(gm) == 0
    control = lower_toy(FOUR, WHERE, strategy="zero3", bucket_bytes=1)
    before = str(control.forward().graph)
    assert str(schedule(control.forward(), control.contexts[FORWARD]).graph) != before


@pytest.mark.parametrize("key", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_work_grows_with_the_graph_and_not_with_its_square(key: tuple[Direction, Variant]) -> None:
    """Counted in Python calls, not in time."""

    def work(layers: int) -> int:
        names = {f"w{i}": (4,) for i in range(layers)}
        made = lower_toy(names, WHERE, strategy="zero3", bucket_bytes=1)
        count = 0

        def tick(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tick)
        try:
            schedule(made.graphs[key], made.contexts[key])
        finally:
            sys.setprofile(None)
        return count

    assert work(120) < 4 * work(40)  # n * log n: 3.9; its square: 9
