"""Decide how a graph gets the node shard of each of its buckets, and which variants of it are compiled."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fcdp_compile.passes.graph.context import PassContext, Source, Use
from fcdp_compile.plan import Direction, Variant


def choose_sources(keys: Collection[str], ctx: PassContext) -> dict[str, Use]:
    """Give every `unshard` the source of its bucket.

        one node, tier none               HOME
        several nodes, tier none          GATHER
        backward                          LOAD
        kept until the backward           GATHER_AND_STORE if the backward uses it, else GATHER
        kept until changed: frozen        LOAD (refreshed before the graph starts when stale)
                            cold          GATHER_AND_STORE
                            warm          LOAD

    A graph that reads a parameter of a bucket from another bucket, or not at all, cannot gather the bucket;
    it loads it.

    keys: of the parameters, in the order of the graph.

    Requires: `bucket`.
    Returns the bucket of each key, with its source; the graph does not change.
    """
    present: dict[int, set[str]] = {}
    for key in keys:
        present.setdefault(ctx.uses[key].bucket.id, set()).add(ctx.specs[key].name)
    found: dict[str, Use] = {}
    for key in keys:
        use = ctx.uses[key]
        found[key] = replace(use, source=_source(use, present[use.bucket.id], ctx))
    return found


def _source(use: Use, present: set[str], ctx: PassContext) -> Source:
    bucket = use.bucket
    if not use.placement.is_cached:
        return Source.HOME if bucket.nodes == 1 else Source.GATHER
    if ctx.direction is Direction.BACKWARD:
        return Source.LOAD
    if not bucket.strategy.is_resident:
        used_again = bucket.id in ctx.backward_buckets
        return Source.GATHER_AND_STORE if used_again else Source.GATHER
    whole = all(p.name in present for p in bucket.params)
    cold = ctx.variant is Variant.COLD and whole and not bucket.frozen
    return Source.GATHER_AND_STORE if cold else Source.LOAD


def variants(ctx: PassContext) -> list[Variant]:
    """Cold alone if no copy outlives the backward; warm alone if cold would store nothing; else both."""
    if ctx.direction is Direction.BACKWARD:
        return [Variant.COLD]
    uses = [u for u in _cold_uses(ctx) if u.bucket.strategy.is_resident]
    if not uses:
        return [Variant.COLD]
    stores = Source.GATHER_AND_STORE in [u.source for u in uses]
    return [Variant.COLD, Variant.WARM] if stores else [Variant.WARM]


def only_loaded(ctx: PassContext) -> list[int]:
    """The buckets that a graph loads even when it is cold."""
    loaded = (u.bucket.id for u in _cold_uses(ctx) if u.source is Source.LOAD)
    return list(dict.fromkeys(loaded))


def _cold_uses(ctx: PassContext) -> list[Use]:
    return list(choose_sources(ctx.uses, replace(ctx, variant=Variant.COLD)).values())
