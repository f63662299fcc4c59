"""Graphs of one model share its device memory."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from builders_graph import Where, make_context, make_specs, toy_backward, toy_forward
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.graph.runner import watched
from fcdp_compile.passes.planning.book import BucketBook
from fcdp_compile.passes.planning.placement import Room
from fcdp_compile.passes.planning.plan_graphs import plan_accumulation, plan_graphs
from fcdp_compile.plan import Direction, Kind, Plan, Tier, Variant
from fcdp_compile.strategy import Life, Strategy


def _context(where: Where) -> PassContext:
    return make_context(make_specs({"a": (64, 64), "b": (32, 32)}, where), where, frozen=["a", "b"])


CONTEXT = _context(Where())


def _plan(name: str, book: BucketBook, context: PassContext = CONTEXT) -> Plan:
    """The plan of an inference graph that reads one parameter."""
    graphs = {Direction.INFERENCE: toy_forward(context.specs, uses=[name])}
    room = Room(capacity_bytes=1 << 20, threshold=1.0)
    return plan_graphs(graphs, book, room, context, number=0).plan


def test_what_other_graphs_keep_is_taken() -> None:
    book = BucketBook(CONTEXT.specs)
    (kept,) = _plan("a", book).placements
    assert kept.tier is Tier.GPU_FULL
    alone, beside = _plan("b", BucketBook(CONTEXT.specs)), _plan("b", book)
    assert alone.peak_bytes is not None
    assert alone.memory_limit_bytes == beside.memory_limit_bytes == 1 << 20
    full_bytes = 64 * 64 * 4
    assert beside.peak_bytes == alone.peak_bytes + full_bytes, "it contains the home shard"
    assert _plan("b", book).peak_bytes == beside.peak_bytes, (
        "a graph's own buckets are counted twice"
    )


def test_a_rank_alone_in_its_node_has_the_whole_bucket_anyway() -> None:
    context = _context(Where(ranks_per_node=1))
    (kept,) = _plan("a", BucketBook(context.specs), context).placements
    assert kept.tier is Tier.GPU


@pytest.mark.parametrize("room_for", [0, 1, 2])
def test_a_plan_says_which_gradients_really_wait(room_for: int) -> None:
    """The host has room for all node shards, and for the waiting gradients of some of the two buckets."""
    where = Where()
    specs = make_specs({"a": (64, 64), "b": (64, 64)}, where)
    each = 2 * 64 * 64 // 4 * 4  # a node shard, and a bucket's gradients reduced within the node
    context = make_context(specs, where, bucket_bytes=1, host_bytes=(2 + room_for) * each)
    book = BucketBook(context.specs)
    graphs = {
        Direction.FORWARD: toy_forward(context.specs),
        Direction.BACKWARD: toy_backward(context.specs),
    }
    room = Room(capacity_bytes=None, threshold=1.0)
    planned = plan_graphs(graphs, book, room, context, number=0, num_fwd_outputs=1)
    assert planned.backward is not None
    plan, _ = plan_accumulation(planned.plan, graphs[Direction.BACKWARD], book, planned.backward)
    (schedule,) = (s for s in plan.schedules if s.variant is Variant.ACCUMULATE)
    accumulated = {s.bucket for s in schedule.steps if s.kind is Kind.ACCUMULATE}
    assert len(accumulated) == room_for
    assert {p.bucket for p in plan.placements if p.accumulates} == accumulated


def test_what_a_pass_changes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fcdp_compile.passes.graph.runner")
    one, both = (toy_forward(CONTEXT.specs, uses=uses) for uses in (["a"], ["a", "b"]))
    for after in (one, both):
        watched("more", {"forward": one}, lambda after=after: {"forward": after})  # type: ignore[misc]
    same, more = (record.message.partition("ms, ")[2] for record in caplog.records)
    assert same == "no op"
    assert "unshard" in more


def test_a_copy_that_lives_until_the_backward_is_held_from_its_store_to_its_load() -> None:
    where = Where()
    specs = make_specs({"a": (64, 64)}, where)
    until_backward = replace(Strategy.parse("fcdp"), life=Life.UNTIL_BACKWARD)
    context = make_context(specs, where, strategy=until_backward)
    graphs = {
        Direction.FORWARD: toy_forward(context.specs),
        Direction.BACKWARD: toy_backward(context.specs),
    }
    room = Room(capacity_bytes=None, threshold=1.0)
    planned = plan_graphs(
        graphs, BucketBook(context.specs), room, context, number=0, num_fwd_outputs=1
    )
    (entry,) = planned.step_memory.entries
    forward, backward = entry.spans
    assert 0 < forward[0] < forward[1] == backward[0] < backward[1]
