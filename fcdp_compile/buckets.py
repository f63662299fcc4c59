"""Buckets from the parameters that they hold, and where they wait if there is room."""

from __future__ import annotations

from collections.abc import Sequence

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import bucket_strategy
from fcdp_compile.plan import Bucket, BucketParam, Tier
from fcdp_compile.strategy import Algorithm, Cache, GradientOn, Strategy
from fcdp_compile.strategy.formats import Format

_TIERS = {
    Cache.NONE: Tier.NONE,
    Cache.GPU: Tier.GPU,
    Cache.GPU_FULL: Tier.GPU_FULL,
    Cache.HOST: Tier.HOST,
    Cache.ADAPTIVE: Tier.HOST,  # until `choose_tiers` has seen the whole step
}

_GRADIENT_TIERS = {
    None: Tier.NONE,
    GradientOn.GPU: Tier.GPU,
    GradientOn.HOST: Tier.HOST,
    GradientOn.AUTO: Tier.HOST,  # until `place_gradients` knows how much room there is
}


def wanted_tier(strategy: Strategy) -> Tier:
    """Where a bucket's copy waits by its strategy, if there is room."""
    return _TIERS[strategy.cache]


def wanted_gradient_tier(strategy: Strategy) -> Tier:
    """Where a bucket's gradients wait between micro-batches by its strategy, if there is room."""
    return _GRADIENT_TIERS[strategy.accumulates_on]


def exact_bucket(number: int, specs: Sequence[ParamSpec], *, is_frozen: bool, why: str) -> Bucket:
    """A bucket that sends and keeps exact values, gathered hierarchically.

    number: its id; -1 if no plan has it.
    specs: its parameters, in order; they agree in dtypes and strategy.  Those with home nodes are put in the
    order of these nodes, so that a node shard has each node's part in one piece.
    """
    params, offset = [], 0
    for spec in sorted(specs, key=lambda s: s.layout.home_node or 0):
        params.append(BucketParam(name=spec.name, layout=spec.layout, offset=offset))
        offset += spec.layout.slot_elements
    gathered, reduced = specs[0].gather_dtype, specs[0].reduce_dtype
    return Bucket(
        id=number,
        params=tuple(params),
        strategy=bucket_strategy(specs[0], is_frozen=is_frozen),
        dtype=str(gathered).removeprefix("torch."),
        itemsize=gathered.itemsize,
        reduce_dtype=str(reduced).removeprefix("torch."),
        reduce_itemsize=reduced.itemsize,
        frozen=is_frozen,
        wire=Format.FULL,
        reduce_wire=Format.FULL,
        host_format=Format.FULL,
        algorithm=Algorithm.HIERARCHICAL,
        why=why,
    )
