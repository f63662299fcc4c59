"""Buckets: which parameters are in one bucket, and which number the bucket has."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule

from builders_graph import (
    GraphBuilder,
    Where,
    bucketed,
    key_of,
    known_after,
    make_context,
    make_spec,
    make_specs,
    placements_of,
    sourced,
    toy_forward,
)
from builders_plan import ranks, shapes
from fcdp_compile.passes.graph.context import PassContext, Source, Use, Uses, buckets_of
from fcdp_compile.plan import BucketParam, Direction, Tier
from fcdp_compile.plan.cost import MACHINES, Link, Machine

WHERE = Where()
SHAPES = {"a": (4, 4), "big": (64, 16), "b": (8,), "c": (4, 8)}


def bucket(gm: GraphModule, ctx: PassContext) -> Uses:
    return bucketed(gm, ctx).uses


def names(uses: Uses) -> list[list[str]]:
    return [[p.name for p in b.params] for b in buckets_of(uses)]


def test_small_parameters_share_and_big_ones_travel_alone() -> None:
    specs = make_specs(SHAPES, WHERE)
    uses = bucket(toy_forward(specs), make_context(specs, WHERE, bucket_bytes=1024))
    assert names(uses) == [["a", "b", "c"], ["big"]]
    assert [b.id for b in buckets_of(uses)] == [0, 1]
    assert "fills a bucket alone" in buckets_of(uses)[1].why


@pytest.mark.parametrize(("bucket_bytes", "groups"), [(96, [["a", "b"]]), (97, [["a", "b", "c"]])])
def test_a_bucket_is_full_at_exactly_its_size(bucket_bytes: int, groups: list[list[str]]) -> None:
    specs = make_specs({"a": (4, 4), "b": (8,), "c": (4,)}, WHERE)  # 64, 32 and 16 bytes
    uses = bucket(toy_forward(specs), make_context(specs, WHERE, bucket_bytes=bucket_bytes))
    assert names(uses)[:1] == groups


def test_numbers_follow_first_use_and_not_the_order_of_inputs() -> None:
    specs = make_specs(SHAPES, WHERE)
    gm = toy_forward(specs, uses=["c", "big", "a", "c", "b"])
    assert names(bucket(gm, make_context(specs, WHERE, bucket_bytes=1024))) == [
        ["c", "a", "b"],
        ["big"],
    ]


def test_frozen_and_trainable_and_dtypes_travel_apart() -> None:
    specs = make_specs({"a": (4,), "frozen": (4,), "b": (4,)}, WHERE)
    half = make_spec("half", (4,), WHERE, gathers=torch.bfloat16)
    wide = make_spec("wide", (4,), WHERE, reduces=torch.float64)
    specs |= {half.key: half, wide.key: wide}
    uses = bucket(toy_forward(specs), make_context(specs, WHERE, frozen=["frozen"]))
    assert names(uses) == [["a", "b"], ["frozen"], ["half"], ["wide"]]
    made = buckets_of(uses)
    assert [b.frozen for b in made] == [False, True, False, False]
    assert [(b.dtype, b.itemsize) for b in made[2:]] == [("bfloat16", 2), ("float32", 4)]
    assert [(b.reduce_dtype, b.reduce_itemsize) for b in made[2:]] == [
        ("bfloat16", 2),
        ("float64", 8),
    ]


def test_every_use_of_a_key_has_the_same_bucket() -> None:
    specs = make_specs({"a": (4,), "b": (4,)}, WHERE)
    uses = bucket(toy_forward(specs, uses=["a", "b", "a"]), make_context(specs, WHERE))
    assert list(uses) == [key_of("a"), key_of("b")]
    assert len(buckets_of(uses)) == 1


@pytest.mark.parametrize(
    ("strategy", "tier"), [("zero3", Tier.NONE), ("zero++", Tier.GPU), ("fcdp", Tier.HOST)]
)
def test_the_strategy_names_the_tier_and_the_reason(strategy: str, tier: Tier) -> None:
    specs = make_specs({"a": (4,)}, WHERE)
    uses = bucket(toy_forward(specs), make_context(specs, WHERE, strategy=strategy))
    (placement,) = placements_of(uses).values()
    assert placement.tier is tier
    assert placement.why
    assert buckets_of(uses)[0].why


def test_one_node_caches_nothing_and_says_so() -> None:
    where = Where(nodes=1)
    specs = make_specs({"a": (4,)}, where)
    (made,) = placements_of(bucket(toy_forward(specs), make_context(specs, where))).values()
    assert made.tier is Tier.NONE
    assert "home shards are node shards" in made.why


def test_a_graph_without_parameters_has_no_buckets() -> None:
    b = GraphBuilder({})
    gm = b.finish(b.call(torch.ops.aten.relu.default, b.input("x", (2,))))
    assert bucket(gm, make_context({}, WHERE)) == {}


def test_two_runs_give_equal_buckets() -> None:
    specs = make_specs(SHAPES, WHERE)
    ctx = make_context(specs, WHERE, bucket_bytes=100)
    assert repr(buckets_of(bucket(toy_forward(specs), ctx))) == repr(
        buckets_of(bucket(toy_forward(specs), ctx))
    )


class TestKnown:
    """A parameter stays in its bucket where that is possible."""

    specs = make_specs({"a": (4,), "b": (4,), "c": (4,)}, WHERE)

    def first(self, strategy: str):
        ctx = make_context(self.specs, WHERE, strategy=strategy)
        uses = bucket(toy_forward(self.specs, uses=["a", "b"]), ctx)
        (made,) = dict.fromkeys(uses.values())
        return made, known_after(uses)

    def again(self, strategy: str, uses: list[str], **more):
        _, known = self.first(strategy)
        ctx = make_context(self.specs, WHERE, strategy=strategy, known=known, next_bucket=1, **more)
        return bucket(toy_forward(self.specs, uses=uses), ctx)

    @pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
    def test_whole_buckets_are_kept_and_new_ones_numbered_behind(self, strategy: str) -> None:
        uses = self.again(strategy, ["b", "c", "a"])
        assert [(b.id, [p.name for p in b.params]) for b in buckets_of(uses)] == [
            (0, ["a", "b"]),
            (1, ["c"]),
        ]

    @pytest.mark.parametrize(("strategy", "kept"), [("zero3", 1), ("zero++", 1), ("fcdp", 0)])
    def test_a_forward_with_a_part_keeps_it_if_it_can_load_it(
        self, strategy: str, kept: int
    ) -> None:
        (made,) = buckets_of(self.again(strategy, ["b"]))
        assert made.id == kept

    @pytest.mark.parametrize(("strategy", "kept"), [("zero3", 1), ("zero++", 0), ("fcdp", 0)])
    def test_so_does_a_backward(self, strategy: str, kept: int) -> None:
        (made,) = buckets_of(self.again(strategy, ["b"], direction=Direction.BACKWARD))
        assert made.id == kept

    @pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
    def test_a_bucket_that_shares_parameters_with_another_is_gathered_whole_or_not(
        self, strategy: str
    ) -> None:
        """Graphs with values that are not the model's own leave such buckets."""
        use, known = self.first(strategy)
        c, (old,) = key_of("c"), make_specs({"c": (4,)}, WHERE).values()
        made = use.bucket
        of_c = replace(made.params[0], name="c", layout=old.layout)
        other = renumbered(use, 1, (made.params[0], of_c))
        known |= {key_of("a"): (use, other), c: (other,)}
        ctx = make_context(self.specs, WHERE, strategy=strategy, known=known, next_bucket=2)
        uses = sourced(bucketed(toy_forward(self.specs), ctx)).uses
        assert uses[key_of("a")].bucket == uses[key_of("b")].bucket == made
        if strategy == "fcdp":  # it is refreshed before the graph starts
            assert (uses[c].bucket, uses[c].source) == (other.bucket, Source.LOAD)
            assert uses[key_of("a")].source is Source.GATHER_AND_STORE
        else:
            assert [p.name for p in uses[c].bucket.params] == ["c"]

    @pytest.mark.parametrize("frozen", [["a"], ["a", "b"]])
    def test_freezing_makes_new_ones(self, frozen: list[str]) -> None:
        uses = self.again("fcdp", ["a", "b"], frozen=frozen)
        assert 0 not in [b.id for b in buckets_of(uses)]
        assert all(b.frozen == all(p.name in frozen for p in b.params) for b in buckets_of(uses))

    def test_a_backward_finds_the_bucket_it_made_before(self) -> None:
        made, known = self.first("zero3")
        own = renumbered(made, 5, made.bucket.params[1:])
        known[key_of("b")] = (made, own)
        ctx = make_context(self.specs, WHERE, strategy="zero3", known=known, next_bucket=6)
        ctx = replace(ctx, direction=Direction.BACKWARD)
        assert bucket(toy_forward(self.specs, uses=["b"]), ctx) == {key_of("b"): own}


def renumbered(use: Use, number: int, params: tuple[BucketParam, ...]) -> Use:
    return replace(
        use,
        bucket=replace(use.bucket, id=number, params=params),
        placement=replace(use.placement, bucket=number),
    )


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(shapes, min_size=1, max_size=6), ranks, st.integers(1, 2000), st.data())
def test_every_parameter_is_in_one_bucket_with_its_slot_behind_the_others(
    drawn: list[tuple[int, ...]], size: tuple[int, int], bucket_bytes: int, data: st.DataObject
) -> None:
    where = Where(nodes=size[0], ranks_per_node=size[1])
    specs = make_specs({f"p{i}": s for i, s in enumerate(drawn)}, where)
    frozen = data.draw(st.sets(st.sampled_from([s.name for s in specs.values()])))
    gm = toy_forward(specs)
    made = buckets_of(
        bucket(gm, make_context(specs, where, frozen=frozen, bucket_bytes=bucket_bytes))
    )
    assert sorted(p.name for b in made for p in b.params) == sorted(s.name for s in specs.values())
    for b in made:
        assert {p.name in frozen for p in b.params} == {b.frozen}
        offset = 0
        for p in b.params:
            assert p.offset == offset
            offset += p.layout.slot_elements
        assert b.slot_elements == offset
        full = [p.layout.slot_elements * p.layout.ranks * b.itemsize for p in b.params]
        assert sum(full[:-1]) < bucket_bytes or sum(full) == bucket_bytes
        assert len(b.params) == 1 or max(full) < bucket_bytes


LAYER = {"norm": (8,), "attention": (16, 8), "mlp": (8, 16)}


def layered(layers: int, bucket_bytes: int | None, frozen: str = "", **more: float):
    """Bucket a model of embedding, layers and head; returns names by bucket."""
    shapes = {"embedding": (40, 8)}
    for i in range(layers):
        shapes |= {f"{i}.{name}": shape for name, shape in LAYER.items()}
    specs = make_specs(shapes | {"head": (8,)}, WHERE)
    ctx = make_context(
        specs,
        WHERE,
        frozen=[s.name for s in specs.values() if frozen and s.name.endswith(frozen)],
        bucket_bytes=bucket_bytes,
    )
    return bucket(toy_forward(specs), replace(ctx, **more))


def test_boundaries_lie_between_layers() -> None:
    uses = layered(5, bucket_bytes=1280)  # a layer takes 1056 bytes, the embedding 1280
    layers = [[f"{i}.{name}" for name in LAYER] for i in range(5)]
    assert names(uses) == [["embedding"], *layers[:4], [*layers[4], "head"]]
    assert "1 x 3 parameters that repeat" in buckets_of(uses)[1].why


def test_boundaries_lie_at_the_same_places_in_each_layer() -> None:
    uses = layered(3, bucket_bytes=600)
    parts = [p for i in range(3) for p in ([f"{i}.norm", f"{i}.attention"], [f"{i}.mlp"])]
    assert names(uses) == [["embedding"], *parts[:-1], [*parts[-1], "head"]]


def test_frozen_layers_are_cut_apart_from_what_is_trained() -> None:
    uses = layered(4, bucket_bytes=1024, frozen="n")  # embedding and attention
    made = {tuple(p.name for p in b.params): b.frozen for b in buckets_of(uses)}
    assert ("embedding",) in made
    assert made["0.attention", "1.attention"]
    assert not made["0.norm", "0.mlp"]


def test_without_a_size_the_link_decides() -> None:
    def with_link(latency_s: float, bytes_per_s: float) -> Machine:
        return replace(MACHINES["cpu"], inter=Link(latency_s=latency_s, bytes_per_s=bytes_per_s))

    assert len(names(layered(40, None, machine=with_link(1.0, 1e12)))) == 1
    wide = make_specs({f"{i}.w": (512, 512) for i in range(8)}, WHERE)  # 1 MiB each
    ctx = make_context(wide, WHERE, bucket_bytes=None)
    found = [
        len(names(bucket(toy_forward(wide), replace(ctx, machine=with_link(s, 2**20)))))
        for s in (1e-3, 2.0, 8.0)  # the least costs 1 MiB, 4 MiB and 8 MiB
    ]
    assert found == [8, 2, 1]
