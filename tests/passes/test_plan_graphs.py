"""Graphs of one model share its device memory."""

from __future__ import annotations

from builders_graph import Where, make_context, make_specs, toy_forward
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.memory.placement import Room
from fcdp_compile.passes.planning.book import BucketBook
from fcdp_compile.passes.planning.plan_graphs import plan_graphs
from fcdp_compile.plan import Direction, Plan, Tier


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
