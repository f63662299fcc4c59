"""Plans made by hand and by hypothesis; the only place where tests build one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st

from fcdp_compile.core.params.layout import ParamLayout
from fcdp_compile.plan import (
    Bucket,
    BucketParam,
    Direction,
    Kind,
    Lane,
    Placement,
    Plan,
    Schedule,
    Step,
    Tier,
    Variant,
)
from fcdp_compile.plan.recording import RecordedRun, Recording
from fcdp_compile.strategy import PRESETS, Algorithm, Scope, Strategy
from fcdp_compile.strategy.formats import Format

# Written out once more, independently of plan.kinds.
LANE_OF: dict[Kind, Lane] = {
    Kind.COMPUTE: Lane.COMPUTE,
    Kind.WAIT: Lane.COMPUTE,
    Kind.FREE: Lane.COMPUTE,
    Kind.INTER_ALL_GATHER: Lane.INTER,
    Kind.INTRA_OWN_ALL_GATHER: Lane.INTRA,
    Kind.INTRA_REST_ALL_GATHER: Lane.INTRA,
    Kind.INTER_REDUCE_SCATTER: Lane.INTER,
    Kind.INTER_ALL_REDUCE: Lane.INTER,
    Kind.INTRA_GRAD_ALL_GATHER: Lane.INTRA,
    Kind.INTRA_ALL_GATHER: Lane.INTRA,
    Kind.INTRA_REDUCE_SCATTER: Lane.INTRA,
    Kind.COLLECT: Lane.H2D,
    Kind.ACCUMULATE: Lane.D2H,
    Kind.STORE: Lane.D2H,
    Kind.LOAD: Lane.H2D,
    Kind.LOAD_HOME: Lane.H2D,
    Kind.STORE_GRADS: Lane.D2H,
}

DTYPES = (("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2), ("int8", 1))


def make_params(
    named_shapes: Sequence[tuple[str, Sequence[int]]], nodes: int, ranks_per_node: int
) -> tuple[BucketParam, ...]:
    """Parameters whose slots follow each other."""
    params: list[BucketParam] = []
    offset = 0
    for name, shape in named_shapes:
        layout = ParamLayout.of(shape, nodes, ranks_per_node)
        params.append(BucketParam(name=name, layout=layout, offset=offset))
        offset += layout.slot_elements
    return tuple(params)


def make_bucket(
    bucket_id: int,
    named_shapes: Sequence[tuple[str, Sequence[int]]],
    *,
    nodes: int = 2,
    ranks_per_node: int = 2,
    dtype: tuple[str, int] = ("bfloat16", 2),
    frozen: bool = False,
    why: str = "one layer",
    strategy: str = "fcdp",
) -> Bucket:
    """A bucket that reduces in fp32."""
    return Bucket(
        id=bucket_id,
        params=make_params(named_shapes, nodes, ranks_per_node),
        strategy=Strategy.parse(strategy),
        dtype=dtype[0],
        itemsize=dtype[1],
        reduce_dtype="float32",
        reduce_itemsize=4,
        frozen=frozen,
        wire=Format.FULL,
        reduce_wire=Format.FULL,
        host_format=Format.FULL,
        algorithm=Algorithm.HIERARCHICAL,
        why=why,
    )


def make_placement(
    bucket: Bucket, *, tier: Tier = Tier.HOST, gradient_tier: Tier | None = None, why: str = "kept"
) -> Placement:
    """A placement, by default on the host; so are gradients, if the bucket is trained."""
    waits = Tier.NONE if bucket.frozen else Tier.HOST
    gradients = waits if gradient_tier is None else gradient_tier
    return Placement(bucket=bucket.id, tier=tier, gradient_tier=gradients, why=why)


def with_buckets(plan: Plan, *buckets: Bucket, tier: Tier = Tier.HOST, **changes: Any) -> Plan:
    """A plan with other buckets, all of them in one tier."""
    placements = tuple(make_placement(b, tier=tier) for b in buckets)
    return replace(plan, buckets=buckets, placements=placements, **changes)


def with_placements(plan: Plan, *, bucket: int | None = None, **changes: Any) -> Plan:
    """A plan with changed placements of all buckets, or of one."""
    placements = tuple(
        replace(p, **changes) if bucket in (None, p.bucket) else p for p in plan.placements
    )
    return replace(plan, placements=placements)


def with_inner(plan: Plan, inner_bytes: int = 4 * 2**20) -> Plan:
    """A plan whose compute steps send these bytes within the node, as if the model were cut there."""

    def of(step: Step) -> Step:
        return replace(step, inner_bytes=inner_bytes) if step.kind is Kind.COMPUTE else step

    schedules = (replace(s, steps=tuple(map(of, s.steps))) for s in plan.schedules)
    return replace(plan, schedules=tuple(schedules))


def make_steps(
    entries: Sequence[tuple[Kind, int | None, int]], *, label: str = ""
) -> tuple[Step, ...]:
    """Steps of (kind, bucket, bytes), each of which waits for the step before it."""
    return tuple(
        Step(
            index=i,
            kind=kind,
            lane=LANE_OF[kind],
            bucket=bucket,
            bytes=size_bytes,
            waits=(i - 1,) if i else (),
            label=label,
        )
        for i, (kind, bucket, size_bytes) in enumerate(entries)
    )


def make_plan(*, graph: int = 0, layers: int = 8, width: int = 512) -> Plan:
    """A LoRA step on 2 x 2: a frozen bucket with all layers, a trainable one with all adapters."""
    frozen = make_bucket(
        0,
        [(f"layers.{i}.q_proj.weight", (width, width)) for i in range(layers)],
        frozen=True,
        why="frozen together",
    )
    adapters = make_bucket(
        1,
        [
            (f"layers.{i}.q_proj.lora_{side}.weight", shape)
            for i in range(layers)
            for side, shape in (("A", (4, width)), ("B", (width, 4)))
        ],
        why="all adapters",
    )
    gathers = [
        (Kind.LOAD, 0, frozen.node_bytes),
        (Kind.INTRA_ALL_GATHER, 0, frozen.node_bytes),
        (Kind.WAIT, 0, 0),
        (Kind.COMPUTE, None, 0),
        (Kind.FREE, 0, 0),
    ]
    cold = [
        (Kind.INTER_ALL_GATHER, 1, adapters.slot_bytes),
        (Kind.WAIT, 1, 0),
        (Kind.STORE, 1, adapters.node_bytes),
        *gathers,
    ]
    backward = [
        *gathers,
        (Kind.INTRA_REDUCE_SCATTER, 1, 2 * adapters.node_bytes),
        (Kind.INTER_REDUCE_SCATTER, 1, 2 * adapters.slot_bytes),
    ]
    return Plan(
        strategy="fcdp",
        nodes=2,
        ranks_per_node=2,
        graph=graph,
        buckets=(frozen, adapters),
        placements=(make_placement(frozen), make_placement(adapters)),
        refresh=(0,),
        schedules=(
            Schedule(
                direction=Direction.FORWARD,
                variant=Variant.COLD,
                steps=make_steps(cold, label="forward cold"),
            ),
            Schedule(direction=Direction.FORWARD, variant=Variant.WARM, steps=make_steps(gathers)),
            Schedule(
                direction=Direction.BACKWARD, variant=Variant.WARM, steps=make_steps(backward)
            ),
        ),
    )


def make_run(schedule: Schedule, *, step_s: float = 0.001) -> RecordedRun:
    """A run whose steps follow each other, each `step_s` long."""
    steps = range(len(schedule.steps))
    return RecordedRun(
        starts_s=tuple(step_s * i for i in steps), ends_s=tuple(step_s * (i + 1) for i in steps)
    )


def make_recordings(plan: Plan, *, steps_s: Sequence[float] = (0.001,)) -> tuple[Recording, ...]:
    """Recordings of all schedules of a plan, with a run for each length of a step."""
    return tuple(
        Recording(
            plan=plan.digest(),
            graph=plan.graph,
            direction=schedule.direction,
            variant=schedule.variant,
            runs=tuple(make_run(schedule, step_s=step_s) for step_s in steps_s),
        )
        for schedule in plan.schedules
    )


# Hypothesis.

ranks = st.tuples(st.integers(1, 5), st.integers(1, 5))
"""N and g."""

shapes = st.lists(st.integers(0, 17), max_size=3).map(tuple)
"""Shapes with scalars, empties and primes among them."""

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
"""Any text but halves of surrogate pairs, control characters included."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any legal plan, small."""
    nodes, ranks_per_node = draw(ranks)
    ids = draw(st.lists(st.integers(0, 40), max_size=3, unique=True))
    keys = st.tuples(st.sampled_from(Direction), st.sampled_from(Variant))
    return Plan(
        strategy=draw(texts.filter(bool)),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        graph=draw(st.integers(0, 2**63 - 1)),
        buckets=tuple(draw(_buckets(bucket_id, nodes, ranks_per_node)) for bucket_id in ids),
        placements=tuple(draw(_placements(bucket_id)) for bucket_id in ids),
        refresh=tuple(draw(st.lists(st.sampled_from(ids), unique=True))) if ids else (),
        schedules=tuple(
            Schedule(direction=direction, variant=variant, steps=draw(_steps(ids)))
            for direction, variant in draw(st.lists(keys, max_size=3, unique=True))
        ),
        peak_bytes=draw(st.none() | st.integers(0, 2**63 - 1)),
        memory_limit_bytes=draw(st.none() | st.integers(0, 2**63 - 1)),
    )


@st.composite
def _buckets(draw: st.DrawFn, bucket_id: int, nodes: int, ranks_per_node: int) -> Bucket:
    names = draw(st.lists(texts.filter(bool), min_size=1, max_size=3, unique=True))
    strategy = draw(st.sampled_from(list(PRESETS.values())))
    nodes = nodes if strategy.home is Scope.GLOBAL else 1
    ranks_per_node = 1 if strategy.home is Scope.NONE else ranks_per_node
    (dtype, itemsize), (reduce_dtype, reduce_itemsize) = draw(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES))
    )
    return Bucket(
        id=bucket_id,
        params=make_params([(name, draw(shapes)) for name in names], nodes, ranks_per_node),
        strategy=strategy,
        dtype=dtype,
        itemsize=itemsize,
        reduce_dtype=reduce_dtype,
        reduce_itemsize=reduce_itemsize,
        frozen=draw(st.booleans()),
        wire=draw(st.sampled_from(Format)),
        reduce_wire=draw(st.sampled_from(Format)),
        host_format=draw(st.sampled_from(Format)),
        algorithm=draw(st.sampled_from(Algorithm)),
        why=draw(texts),
    )


def _placements(bucket_id: int) -> st.SearchStrategy[Placement]:
    tiers = st.sampled_from(Tier)
    return st.builds(
        Placement, bucket=st.just(bucket_id), tier=tiers, gradient_tier=tiers, why=texts
    )


@st.composite
def _steps(draw: st.DrawFn, ids: list[int]) -> tuple[Step, ...]:
    kinds = st.sampled_from(Kind) if ids else st.just(Kind.COMPUTE)
    steps: list[Step] = []
    for i, kind in enumerate(draw(st.lists(kinds, max_size=5))):
        moves = LANE_OF[kind] is not Lane.COMPUTE
        waits = draw(st.lists(st.integers(0, i - 1), max_size=2, unique=True)) if i else []
        steps.append(
            Step(
                index=i,
                kind=kind,
                lane=LANE_OF[kind],
                bucket=None if kind is Kind.COMPUTE else draw(st.sampled_from(ids)),
                bytes=draw(st.integers(0, 2**63 - 1)) if moves else 0,
                waits=tuple(waits),
                label=draw(texts),
            )
        )
    return tuple(steps)


times = st.floats(0, 1e6)
"""Seconds since the start of a run."""


@st.composite
def recordings(draw: st.DrawFn) -> tuple[Recording, ...]:
    """Any legal recordings of one plan, small."""
    keys = st.tuples(st.sampled_from(Direction), st.sampled_from(Variant))
    return tuple(
        Recording(
            plan=draw(texts),
            graph=draw(st.integers(0, 2**63 - 1)),
            direction=direction,
            variant=variant,
            runs=draw(_runs(draw(st.integers(0, 4)))),
        )
        for direction, variant in draw(st.lists(keys, max_size=3, unique=True))
    )


@st.composite
def _runs(draw: st.DrawFn, steps: int) -> tuple[RecordedRun, ...]:
    spans = st.tuples(times, times).map(sorted)
    runs = draw(st.lists(st.lists(spans, min_size=steps, max_size=steps), min_size=1, max_size=3))
    return tuple(
        RecordedRun(starts_s=tuple(a for a, _ in run), ends_s=tuple(b for _, b in run))
        for run in runs
    )
