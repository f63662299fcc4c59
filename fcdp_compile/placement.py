"""Where buckets and gradients that wait find their places: between what passes propose and what a model has.

A part of the backend, which knows both passes and runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from fcdp_compile.options import Options
from fcdp_compile.passes.bucket import reduced_params
from fcdp_compile.passes.choose_tiers import Placement, choose_tiers, place_bucket
from fcdp_compile.passes.context import PassContext
from fcdp_compile.passes.place_gradients import fit_gradients, gradient_bytes, place_gradients
from fcdp_compile.passes.predict import StepMemory, fixed_bytes, predict
from fcdp_compile.plan import Bucket, Direction, Tier, Variant
from fcdp_compile.runtime.device_memory import DeviceMemory
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.strategy import Cache

Graphs = Mapping[Direction, GraphModule]
Lowered = Mapping[tuple[Direction, Variant], GraphModule]


def place_on_device(
    model: ShardedModel,
    graphs: Graphs,
    lowered: Lowered,
    buckets: Sequence[Bucket],
    ctx: PassContext,
    options: Options,
) -> tuple[list[Bucket], int | None]:
    """The buckets, as many of them and of their gradients on the device as there is room for.

    graphs: before and after `lower`.

    Returns the predicted peak in bytes too; None without a capacity, and for a cache that does not adapt.
    """
    placed, room_bytes, peak_bytes = list(buckets), None, None
    memory = _adaptive_memory(model, options)
    if memory is not None:
        step = predict(graphs, lowered, buckets, ctx, device_type=model.device.type)
        placement = _placement(model, step, buckets, memory, options.memory_threshold)
        peak_bytes = placement.peak_bytes
        room_bytes = max(0, int(options.memory_threshold * memory.capacity_bytes) - peak_bytes)
        placed = [place_bucket(b, placement) for b in placed]
    return place_gradients(placed, room_bytes=room_bytes), peak_bytes


def fit_on_host(model: ShardedModel, backward: GraphModule, ctx: PassContext) -> PassContext:
    """A context whose gradients wait only if host memory has room for them, which is then taken.

    What was found of gradients before stays: a rank that recompiles a graph must do as those that do not.
    """
    memory, reduced = model.host_memory, reduced_params(backward, ctx)
    new = [b for b, params in reduced.items() if not memory.has_decided(params)]
    fitting = fit_gradients(new, host_bytes=memory.left_bytes)
    for bucket, fitted in zip(new, fitting, strict=True):
        waits = fitted.gradient_tier is not Tier.NONE
        on_host = gradient_bytes(bucket) if bucket.strategy.uses_host else 0
        memory.plan_gradients(reduced[bucket], on_host if waits else None)
    now = {
        b: b if memory.has_place(params) else replace(b, gradient_tier=Tier.NONE)
        for b, params in reduced.items()
    }
    known = {key: tuple(now.get(b, b) for b in found) for key, found in ctx.known.items()}
    return replace(ctx, known=known)


def _adaptive_memory(model: ShardedModel, options: Options) -> DeviceMemory | None:
    """The memory that an adaptive cache may use, which the cache then asks; None if there is none."""
    if all(strategy.cache is not Cache.ADAPTIVE for strategy in model.strategies):
        return None
    model.cache.memory = DeviceMemory.of(
        model.device, capacity_bytes=options.device_memory, threshold=options.memory_threshold
    )
    return model.cache.memory


def _placement(
    model: ShardedModel,
    step: StepMemory,
    buckets: Sequence[Bucket],
    memory: DeviceMemory,
    threshold: float,
) -> Placement:
    placement = choose_tiers(
        step.entries,
        step.alive_bytes,
        static_bytes=step.static_bytes + model.kept_by_others([b.id for b in buckets]),
        capacity_bytes=memory.capacity_bytes,
        threshold=threshold,
    )
    model.note_placement(
        {b.id: fixed_bytes(b) for b in buckets}
        | {
            e.bucket: e.bytes_in(c.tier)
            for e, c in zip(step.entries, placement.choices, strict=True)
        },
        placement.peak_bytes,
    )
    return placement
