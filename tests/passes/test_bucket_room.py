"""Which buckets wait on the host while there is room."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule

from builders_graph import (
    Where,
    bucketed,
    key_of,
    known_after,
    make_context,
    make_specs,
    placements_of,
    toy_forward,
)
from builders_plan import shapes
from fcdp_compile.passes.graph.context import PassContext, Uses, buckets_of
from fcdp_compile.plan import Direction, Tier

WHERE = Where()


def bucket(gm: GraphModule, ctx: PassContext) -> Uses:
    return bucketed(gm, ctx).uses


class TestHostBudget:
    """Node shards on the host: a of 32 bytes, frozen f of 64, b of 16, c of 32."""

    specs = make_specs({"a": (16,), "f": (32,), "b": (8,), "c": (16,)}, WHERE)

    def context(self, host_bytes: int | None, **more):
        ctx = make_context(
            self.specs, WHERE, frozen=["f"], bucket_bytes=1, host_bytes=host_bytes, **more
        )
        assert [b.node_bytes for b in buckets_of(bucket(toy_forward(self.specs), ctx))] == [
            32,
            64,
            16,
            32,
        ]
        return ctx

    def on_host(self, host_bytes: int | None, **more) -> str:
        gm = bucket(toy_forward(self.specs), self.context(host_bytes, **more))
        placements = placements_of(gm)
        kept = [b for b in buckets_of(gm) if placements[b.id].is_cached]
        return " ".join(p.name for b in kept for p in b.params)

    @pytest.mark.parametrize(
        ("host_bytes", "expected"),
        [
            (None, "a f b c"),
            (144, "a f b c"),
            (143, "a f b"),
            (112, "a f b"),
            (96, "a f"),
            (95, "a b c"),  # a later bucket may fit although an earlier one does not
            (79, "a b"),
            (31, "b"),
            (15, ""),
            (0, ""),
        ],
    )
    def test_in_order_while_they_fit(self, host_bytes: int | None, expected: str) -> None:
        assert self.on_host(host_bytes) == expected

    def test_the_reason_names_budget_and_limit(self) -> None:
        gm = bucket(toy_forward(self.specs), self.context(32))
        reasons = [p.why for p in placements_of(gm).values()]
        assert "keeps node shards on the host" in reasons[0]
        for why in reasons[1:]:
            assert why == (
                "gathered at every use: it does not fit; options={'host_memory': …} leaves the cache "
                "0.0 MiB of host memory per rank"
            )

    @pytest.mark.parametrize("strategy", ["zero3", "zero++"])
    def test_what_is_not_on_the_host_needs_none(self, strategy: str) -> None:
        assert self.on_host(0, strategy=strategy) == self.on_host(None, strategy=strategy)

    def test_graphs_share_one_budget_and_keep_what_they_have(self) -> None:
        specs = self.specs
        first = bucket(toy_forward(specs, uses=["b", "a"]), self.context(80))
        known = known_after(first)
        ctx = self.context(80, known=known, next_bucket=2)
        second = bucket(toy_forward(specs, uses=["a", "f", "c"]), ctx)
        assert [(i, p.tier) for i, p in placements_of(second).items()] == [
            (1, Tier.HOST),
            (2, Tier.NONE),
            (3, Tier.HOST),
        ]
        # f would fit now, but a rank that compiles again must get the earlier result.
        known = known_after(second, known)
        roomy = self.context(1000, known=known, next_bucket=4)
        third = bucket(toy_forward(specs, uses=["f", "c", "b"]), roomy)
        assert [b.id for b in buckets_of(third)] == [2, 3, 0]

    def test_what_freezing_replaces_counts_no_more(self) -> None:
        specs = self.specs
        ctx = self.context(112)
        first = bucket(toy_forward(specs), ctx)
        placements = placements_of(first)
        assert [p.tier for p in placements.values()] == [Tier.HOST] * 3 + [Tier.NONE]
        known = known_after(first)
        ctx = replace(ctx, known=known, next_bucket=4, frozen=frozenset([key_of("a")]))
        again = bucket(toy_forward(specs), ctx)
        tiers = {i: p.tier for i, p in placements_of(again).items()}
        assert [(b.id, b.frozen, tiers[b.id]) for b in buckets_of(again)] == [
            (4, True, Tier.HOST),
            (5, False, Tier.HOST),
            (2, False, Tier.HOST),
            (3, False, Tier.NONE),
        ]

    def test_a_part_of_what_has_no_place_is_a_bucket_of_its_own(self) -> None:
        """The bucket cannot be loaded, and this graph lacks the bucket's other parameters."""
        ctx = make_context(self.specs, WHERE, host_bytes=0)
        first = bucket(toy_forward(self.specs, uses=["a", "b"]), ctx)
        (made,) = buckets_of(first)
        known = known_after(first)
        for direction in (Direction.FORWARD, Direction.BACKWARD):
            now = replace(ctx, known=known, next_bucket=1, direction=direction)
            part = bucket(toy_forward(self.specs, uses=["b"]), now)
            assert {i: p.tier for i, p in placements_of(part).items()} == {1: Tier.NONE}
            (whole,) = buckets_of(bucket(toy_forward(self.specs, uses=["b", "a"]), now))
            assert whole == made


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), max_size=3), st.data())
def test_host_memory_is_never_exceeded_and_never_refused_where_it_fits(
    graphs: list[list[int]], data: st.DataObject
) -> None:
    """Several graphs of one model; each uses some of ten parameters, each in a bucket of its own."""
    drawn = data.draw(st.lists(shapes, min_size=10, max_size=10))
    where = Where(nodes=2, ranks_per_node=3)
    specs = make_specs({f"p{i}": s for i, s in enumerate(drawn)}, where)
    frozen = data.draw(st.sets(st.sampled_from([s.name for s in specs.values()])))
    budget = data.draw(st.integers(0, 600))
    known, ids, left = {}, 0, budget
    for uses in graphs:
        ctx = make_context(
            specs, where, frozen=frozen, bucket_bytes=0, host_bytes=budget, known=known
        )
        ctx = replace(ctx, next_bucket=ids)
        for key, use in bucket(toy_forward(specs, uses=[f"p{i}" for i in uses]), ctx).items():
            (param,) = use.bucket.params
            if use.bucket.id < ids:
                assert known[key] == (use,)
                continue
            size = param.layout.slot_elements * 4 * where.nodes
            tier = use.placement.tier
            assert (tier is Tier.HOST) == (size <= left), (size, left)
            left -= size if tier is Tier.HOST else 0
            known = known | {key: (use,)}
        ids = 1 + max((use.bucket.id for (use,) in known.values()), default=-1)
    cached = [use.bucket for (use,) in known.values() if use.placement.tier is Tier.HOST]
    assert sum(b.node_bytes for b in cached) == budget - left <= budget
