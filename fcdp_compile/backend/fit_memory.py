"""Where buckets and gradients of a model find their places: between what passes propose and what it has.

A part of the backend, which knows both passes and runtime.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule

from fcdp_compile.backend.options import Options
from fcdp_compile.passes.bucket import reduced_params
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.memory.place_gradients import fit_gradients, gradient_bytes
from fcdp_compile.passes.memory.placement import Placed, Room, place_all
from fcdp_compile.passes.pipeline import Graphs, Lowered
from fcdp_compile.plan import Tier
from fcdp_compile.runtime.cache.device_memory import DeviceMemory
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.strategy import Cache


def place_on_device(
    model: ShardedModel, graphs: Graphs, lowered: Lowered, ctx: PassContext, options: Options
) -> Placed:
    """The buckets, as many of them and of their gradients on the device as there is room for."""
    memory = _adaptive_memory(model, options)
    room = Room(
        capacity_bytes=None if memory is None else memory.capacity_bytes,
        threshold=options.memory_threshold,
        taken_bytes=model.kept_by_others([b.id for b in lowered.buckets]),
    )
    placed, kept_bytes = place_all(graphs, lowered, ctx, room, device_type=model.device.torch.type)
    model.note_placement(kept_bytes, placed.peak_bytes)
    return placed


def fit_on_host(model: ShardedModel, backward: GraphModule, ctx: PassContext) -> PassContext:
    """A context whose gradients wait only if host memory has room for them, which is then taken.

    What was found of gradients before stays: a rank that recompiles a graph must do as those that do not.
    """
    memory, reduced = model.host_memory, reduced_params(backward, ctx)
    new = [b for b, params in reduced.items() if not memory.has_decided(params)]
    fitting = fit_gradients(new, ctx.placements, host_bytes=memory.left_bytes)
    for bucket, waits in zip(new, fitting, strict=True):
        on_host = gradient_bytes(bucket) if bucket.strategy.uses_host else 0
        memory.plan_gradients(reduced[bucket], on_host if waits else None)
    without = [b.id for b, params in reduced.items() if not memory.has_place(params)]
    reducing = {i: replace(ctx.placements[i], gradient_tier=Tier.NONE) for i in without}
    return replace(ctx, placements={**ctx.placements, **reducing})


def _adaptive_memory(model: ShardedModel, options: Options) -> DeviceMemory | None:
    """The memory that an adaptive cache may use, which the cache then asks; None if there is none."""
    if all(strategy.cache is not Cache.ADAPTIVE for strategy in model.strategies):
        return None
    asked = options.device_memory
    model.cache.memory = DeviceMemory.of(
        model.device,
        capacity_bytes=model.gpu_bytes if asked is None else asked,
        threshold=options.memory_threshold,
    )
    return model.cache.memory
