"""Group the parameters of a graph into the buckets they travel in."""

from __future__ import annotations

from dataclasses import replace

from torch.fx import GraphModule, Node

from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.context import META, PassContext, Use
from fcdp_compile.plan import Bucket, BucketParam, Direction, Tier
from fcdp_compile.registry import ParamSpec
from fcdp_compile.strategy import Cache

_TIERS = {Cache.NONE: Tier.NONE, Cache.GPU: Tier.GPU, Cache.HOST: Tier.HOST}


def bucket(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Give every `unshard` its bucket.

        unshard(a) unshard(b) unshard(big) unshard(c)  ->  bucket 0: a b c    bucket 1: big

    In order of first use, frozen and trainable and dtypes apart: a parameter that fills a bucket alone gets
    one of its own, which needs no copy on either side; smaller ones share a bucket until it is full, so
    that all adapters of a graph travel together.  A parameter stays in the bucket it already has, so that
    graphs of one model share cached copies, unless it was frozen or unfrozen since, or the bucket must be
    gathered here and this graph lacks some of its parameters.

    Requires: nothing.
    Leaves: a `Use` with a bucket on every `unshard`; no other change.
    """
    unshards = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    keys = list(dict.fromkeys(str(n.args[1]) for n in unshards))
    found = _reusable(keys, ctx)
    fresh = _Filling(ctx)
    for key in keys:
        if key not in found:
            fresh.add(key)
    found |= fresh.finish()
    for node in unshards:
        node.meta[META] = Use(bucket=found[str(node.args[1])])
    return gm


def _reusable(keys: list[str], ctx: PassContext) -> dict[str, Bucket]:
    by_name = {ctx.specs[k].name: k for k in keys}
    loads = ctx.strategy.is_resident or (
        ctx.direction is Direction.BACKWARD and ctx.strategy.cache is not Cache.NONE
    )

    def is_reusable(bucket: Bucket) -> bool:
        members = [by_name[p.name] for p in bucket.params if p.name in by_name]
        unchanged = all(
            bucket in ctx.known.get(k, ()) and (k in ctx.frozen) == bucket.frozen for k in members
        )
        # What a backward gathers for itself is cached by nobody.
        kept = bucket.tier is _TIERS[ctx.strategy.cache] or ctx.direction is Direction.BACKWARD
        return kept and unchanged and (loads or len(members) == len(bucket.params))

    found = {k: next(filter(is_reusable, ctx.known.get(k, ())), None) for k in keys}
    return {k: bucket for k, bucket in found.items() if bucket is not None}


class _Filling:
    """Buckets being filled, one for each kind of parameter; numbered in order of first use."""

    def __init__(self, ctx: PassContext) -> None:
        self._ctx = ctx
        self._groups: list[list[str]] = []
        self._open: dict[tuple[object, ...], list[str]] = {}

    def add(self, key: str) -> None:
        spec = self._ctx.specs[key]
        size = _gathered_bytes(spec)
        if size >= self._ctx.bucket_bytes:
            self._groups.append([key])
            return
        kind = (key in self._ctx.frozen, spec.gather_dtype, spec.reduce_dtype)
        group = self._open.get(kind)
        if group is None:
            group = self._open[kind] = []
            self._groups.append(group)
        group.append(key)
        if sum(_gathered_bytes(self._ctx.specs[k]) for k in group) >= self._ctx.bucket_bytes:
            del self._open[kind]

    def finish(self) -> dict[str, Bucket]:
        result: dict[str, Bucket] = {}
        for number, group in enumerate(self._groups, self._ctx.next_bucket):
            made = _make(number, group, self._ctx)
            result |= dict.fromkeys(group, made)
        return result


def _gathered_bytes(spec: ParamSpec) -> int:
    return spec.layout.slot_elements * spec.layout.ranks * spec.gather_dtype.itemsize


def _make(number: int, keys: list[str], ctx: PassContext) -> Bucket:
    specs = [ctx.specs[k] for k in keys]
    params, offset = [], 0
    for spec in specs:
        params.append(BucketParam(name=spec.name, layout=spec.layout, offset=offset))
        offset += spec.layout.slot_elements
    frozen = keys[0] in ctx.frozen
    made = Bucket(
        id=number,
        params=tuple(params),
        dtype=str(specs[0].gather_dtype).removeprefix("torch."),
        itemsize=specs[0].gather_dtype.itemsize,
        reduce_dtype=str(specs[0].reduce_dtype).removeprefix("torch."),
        reduce_itemsize=specs[0].reduce_dtype.itemsize,
        frozen=frozen,
        tier=Tier.NONE if ctx.direction is Direction.BACKWARD else _TIERS[ctx.strategy.cache],
        why="",
    )
    return replace(made, why=_reason(made, ctx))


def _reason(made: Bucket, ctx: PassContext) -> str:
    alone = made.full_bytes(ctx.nodes, ctx.ranks_per_node) >= ctx.bucket_bytes
    size = (
        "fills a bucket alone"
        if len(made.params) == 1 and alone
        else "shared by order of first use"
    )
    if made.tier is Tier.NONE:
        uncached = ctx.strategy.cache is Cache.NONE
        kept = "strategy caches nothing" if uncached else "the forward does not gather it"
        kept = "one node, nothing to cache" if ctx.nodes == 1 else kept
    else:
        life = "until it changes" if ctx.strategy.is_resident else "until the backward"
        kept = f"{ctx.strategy.name} keeps node shards on the {made.tier.value} {life}"
    return f"{size}; {kept}"


def buckets_of(gm: GraphModule) -> list[Bucket]:
    """The buckets of a graph that `bucket` has seen, in order of first use."""
    nodes: list[Node] = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    uses = [n.meta[META] for n in nodes]
    return list(dict.fromkeys(u.bucket for u in uses))
