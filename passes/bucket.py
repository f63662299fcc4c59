"""Group the parameters of a graph into buckets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from fcdp_compile.buckets import exact_bucket, wanted_gradient_tier, wanted_tier
from fcdp_compile.cluster.bucket_size import bucket_bytes
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import bucket_strategy, wire_format
from fcdp_compile.passes.graph.context import PassContext, Use
from fcdp_compile.passes.graph.grouping import group
from fcdp_compile.plan import Bucket, Direction, Placement, Tier
from fcdp_compile.strategy import Cache, Strategy

_Kind = tuple[bool, torch.dtype, torch.dtype, torch.dtype | None, Strategy]
"""frozen, gather dtype, reduce dtype, home dtype if home shards are on the host, strategy.

All parameters of a bucket agree in these.
"""


def bucket(keys: Collection[str], ctx: PassContext) -> dict[str, Use]:
    """Give every `unshard` its bucket.

        unshard(a) unshard(b) unshard(big) unshard(c)  ->  bucket 0: a b c    bucket 1: big

    Parameters fill buckets in the order of first use; frozen and trainable parameters, and different dtypes,
    get separate buckets.  A parameter that fills a bucket alone gets its own bucket, which needs no copy to
    pack or unpack it.  Smaller parameters share a bucket until it is full; buckets end at the same places in
    every layer (`group`), so that equal layers become equal segments.  Adapters are small, so all adapters of
    a graph are sent together.  A bucket is full at `ctx.bucket_bytes`, or at a size that suits the inter link
    (`bucket_bytes`); buckets of matrices with home nodes are larger.  A parameter stays in the bucket that it
    already has, so that graphs of one model share cached copies.  It gets a new bucket if it was frozen or
    unfrozen since, if this graph gathers it in another dtype (`narrow`), or if this graph must gather the
    bucket and lacks some of its parameters.

    If node shards are kept on the host, new buckets take the rest of the host budget one after the other.
    A bucket that does not fit has no tier and is gathered at every use, in this graph and in later graphs.

    keys: of the parameters, in the order of the graph.

    Requires: nothing.
    Returns the bucket of each key, with its placement; the graph does not change.
    """
    found = _reusable(keys, ctx)
    found |= _fill([k for k in keys if k not in found], ctx)
    return {key: found[key] for key in keys}


def _reusable(keys: Collection[str], ctx: PassContext) -> dict[str, Use]:
    """The known buckets that serve these parameters, if they are frozen or trained as before.

    A bucket that this graph loads serves any of its parameters.  A bucket that it gathers serves only if the
    graph reads all of its parameters, and none of them got another bucket here.
    """
    by_name = {ctx.specs[k].name: k for k in keys}
    found: dict[str, Use] = {}
    for key in keys:
        for use in ctx.serving(key) if key not in found else ():
            bucket = use.bucket
            members = [by_name[p.name] for p in bucket.params if p.name in by_name]
            unchanged = all(
                use in ctx.serving(k) and (k in ctx.frozen) == bucket.frozen for k in members
            )
            can_load = bucket.strategy.is_resident or ctx.direction is Direction.BACKWARD
            if unchanged and can_load and use.placement.is_cached:
                found[key] = use
                break
            has_all = len(members) == len(bucket.params)
            if unchanged and has_all and found.keys().isdisjoint(members):
                found |= dict.fromkeys(members, use)
                break
    return found


def _fill(fresh: list[str], ctx: PassContext) -> dict[str, Use]:
    """Make buckets for the parameters in `fresh`, numbered in order of first use."""
    total_bytes: dict[_Kind, int] = {}
    for key in ctx.specs:  # a step runs the model's other graphs, too
        kind = _kind(key, ctx)
        total_bytes[kind] = total_bytes.get(kind, 0) + _gathered_bytes(ctx.specs[key])
    members: dict[_Kind, list[str]] = {}
    for key in fresh:
        members.setdefault(_kind(key, ctx), []).append(key)
    groups: list[tuple[list[str], str]] = []
    for kind, of_kind in members.items():
        specs = [ctx.specs[k] for k in of_kind]
        target = _target(total_bytes[kind], specs, ctx)
        shapes, sizes = [s.layout.shape for s in specs], [_gathered_bytes(s) for s in specs]
        groups += [([of_kind[i] for i in g.items], g.why) for g in group(shapes, sizes, target)]
    order = {key: i for i, key in enumerate(fresh)}
    groups.sort(key=lambda g: order[g[0][0]])
    found: dict[str, Use] = {}
    taken_bytes = host_bytes_taken(ctx)
    for number, (together, why) in enumerate(groups, ctx.next_bucket):
        made = _make(number, together, why, taken_bytes, ctx)
        if made.placement.tier is Tier.HOST:
            taken_bytes += made.bucket.host_bytes
        found |= dict.fromkeys(together, made)
    return found


_MATRICES_OF_A_NODE = 2
"""How many of the largest matrices a bucket has room for, for each node.

For Llama 3 8B's shapes, the node that sends most then sends 1.2 times the mean of 2 nodes, 1.3 of 4 to 16.
"""


def _kind(key: str, ctx: PassContext) -> _Kind:
    spec, is_frozen = ctx.specs[key], key in ctx.frozen
    on_host = None if spec.computes_on is None else spec.home_dtype
    fit = bucket_strategy(spec, is_frozen=is_frozen)
    return is_frozen, spec.gather_dtype, spec.reduce_dtype, on_host, fit


def _target(total_bytes: int, specs: Sequence[ParamSpec], ctx: PassContext) -> int:
    if ctx.bucket_bytes is not None:
        return ctx.bucket_bytes
    link = ctx.machine.inter
    best = bucket_bytes(total_bytes, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
    if not specs[0].strategy.whole_matrices:
        return best
    # Each node sends whole matrices: in a bucket of few, one node would send and the others wait.
    return max(best, _MATRICES_OF_A_NODE * ctx.nodes * max(map(_gathered_bytes, specs)))


def host_bytes_taken(ctx: PassContext) -> int:
    """Host bytes of the known buckets whose parameters were not frozen or unfrozen since.

    The copy of any other bucket is released before the bucket that replaces it is stored.
    """
    keys = {spec.name: key for key, spec in ctx.specs.items()}
    known = dict.fromkeys(use for uses in ctx.known.values() for use in uses)
    return sum(
        u.bucket.host_bytes
        for u in known
        if u.placement.tier is Tier.HOST
        and all((keys[p.name] in ctx.frozen) == u.bucket.frozen for p in u.bucket.params)
    )


def _gathered_bytes(spec: ParamSpec) -> int:
    return spec.layout.slot_elements * spec.layout.slots * spec.gather_dtype.itemsize


def _make(number: int, keys: list[str], why: str, taken_bytes: int, ctx: PassContext) -> Use:
    specs = [ctx.specs[k] for k in keys]
    frozen = keys[0] in ctx.frozen
    exact = exact_bucket(number, specs, is_frozen=frozen, why=why)
    strategy = exact.strategy
    weights, on_host = strategy.formats(is_frozen=frozen)
    made = replace(
        exact,
        wire=wire_format(weights, specs[0].gather_dtype),
        reduce_wire=wire_format(strategy.gradient_format, specs[0].reduce_dtype),
        algorithm=strategy.algorithm,
    )
    if made.wire is weights:
        made = replace(made, host_format=on_host)
    tier = _tier(made, taken_bytes, ctx)
    return Use(
        bucket=made,
        placement=Placement(
            bucket=number,
            tier=tier,
            gradient_tier=Tier.NONE if frozen else _gradient_tier(strategy, ctx),
            why=_why_kept(made, tier, ctx),
        ),
    )


def _gradient_tier(strategy: Strategy, ctx: PassContext) -> Tier:
    if ctx.direction is Direction.BACKWARD:  # gradients are reduced in the buckets of the forward
        return Tier.NONE
    return wanted_gradient_tier(strategy)


def _tier(made: Bucket, taken_bytes: int, ctx: PassContext) -> Tier:
    if ctx.direction is Direction.BACKWARD:
        return Tier.NONE
    tier = wanted_tier(made.strategy)
    if tier is not Tier.HOST or ctx.host_budget is None:
        return tier
    fits = taken_bytes + made.host_bytes <= ctx.host_budget.bytes
    return tier if fits else Tier.NONE


def _why_kept(made: Bucket, tier: Tier, ctx: PassContext) -> str:
    if tier is not Tier.NONE:
        life = "until it changes" if made.strategy.is_resident else "until the backward"
        if tier is Tier.GPU_FULL:
            return f"{made.strategy.name} keeps it on the gpu in full {life}"
        return f"{made.strategy.name} keeps node shards on the {tier.value} {life}"
    if made.strategy.cache is Cache.NONE:
        on_one = "home shards are node shards, nothing to cache"
        return on_one if made.nodes == 1 else "strategy caches nothing"
    if ctx.direction is Direction.BACKWARD:
        return "the forward does not cache this bucket"
    assert ctx.host_budget is not None, f"bucket {made.id} has no tier for no reason"
    mib = ctx.host_budget.bytes / 2**20
    use = "gathered at every use" if made.nodes > 1 else "home shards stay on the gpu"
    return (
        f"{use}: it does not fit; {ctx.host_budget.limit.value} leaves the cache "
        f"{mib:.1f} MiB of host memory per rank"
    )
