"""Replace gathers of parameters by explicit communication nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fcdp_compile import ops
from fcdp_compile.core.params.packing import pack_home, unpack_full
from fcdp_compile.passes.graph.context import META, Packing, PassContext, Source
from fcdp_compile.passes.graph.explicit import erase_unused, explicit, wait_for
from fcdp_compile.passes.graph.inline import fake_flat, inline
from fcdp_compile.passes.graph.views import copy_returned, same_values
from fcdp_compile.plan import Bucket, Tier
from fcdp_compile.strategy import Algorithm
from fcdp_compile.strategy.formats import DIFFERENCE_SCRATCH_BYTES, Format


def gather_params(
    graph: Graph, bucket: Bucket, unshards: list[Node], stores: list[Node], ctx: PassContext
) -> Node | None:
    """Replace the `unshard`s of a bucket by its gather; a part of `lower`.

    stores: gets the bucket's `store`, for which the graph must wait before it ends.

    Returns the gathered buffer; None if one rank has the whole bucket and gathers nothing.
    """
    shards = {ctx.specs[str(n.args[1])].name: same_values(n.all_input_nodes[0]) for n in unshards}
    layouts = [p.layout for p in bucket.params]
    with graph.inserting_before(unshards[0]):
        started = _start(graph, bucket, unshards[0], shards, stores, ctx)
        is_pending = started.target in ops.EXPLICIT
        buffer = wait_for(graph, started) if is_pending else started
        full = inline(graph, lambda b: unpack_full(b[0], layouts), [buffer], ctx.decompositions)
    params = dict(zip([p.name for p in bucket.params], full, strict=True))
    used = [params[ctx.specs[str(n.args[1])].name] for n in unshards]
    for node, param in zip(unshards, used, strict=True):
        param.meta |= node.meta
        node.replace_all_uses_with(param)
        erase_unused([node])
    if bucket.ranks_per_node == 1 or bucket.strategy.may_keep_full:
        copy_returned(graph, used)
    erase_unused([p for p in full if not p.users])
    return buffer if is_pending else None


def _start(
    graph: Graph,
    bucket: Bucket,
    like: Node,
    shards: dict[str, Node],
    stores: list[Node],
    ctx: PassContext,
) -> Node:
    """Insert the steps of the gather; return the last step, or the home buffer if there are no steps.

    like: an `unshard` of the bucket.
    """
    use = ctx.uses[str(like.args[1])]
    source, tier = use.source, use.placement.tier
    assert source is not None, f"bucket {bucket.id} has no source; run `choose_sources` first"
    steps = _Steps(graph, bucket, like)
    tier_bytes = bucket.host_bytes if tier is Tier.HOST else 0
    if source is Source.LOAD:
        buffer = home = steps.add(ops.load, [], bucket.slots_per_node_shard, tier_bytes)
    else:
        missing = [p.name for p in bucket.params if p.name not in shards]
        assert not missing, f"bucket {bucket.id} cannot be gathered in a graph without {missing}"
        members = [shards[p.name] for p in bucket.params]
        buffer = home = _home(graph, bucket, members, like, ctx)
    crosses = source in (Source.GATHER, Source.GATHER_AND_STORE) and bucket.nodes > 1
    if crosses:
        sent = (bucket.nodes - 1) * bucket.wire_bytes
        if bucket.wire is Format.DELTA:
            sent = math.ceil(sent * ctx.delta_bits / 16)
        scratch = _scratch_bytes(bucket, ctx)
        slots = bucket.slots_per_node_shard
        buffer = steps.add(ops.inter_all_gather, [home], slots, sent, scratch_bytes=scratch)
    is_overlapped = crosses and bucket.algorithm is Algorithm.HO_RING
    own = steps.add_own(home) if is_overlapped else None
    if source is Source.GATHER_AND_STORE:
        stores.append(explicit(graph, ops.store, [buffer], bucket, tier_bytes))
    if bucket.ranks_per_node == 1:
        return buffer
    if own is not None:
        return steps.add_rest(buffer, own)
    is_there = source is Source.LOAD and tier is Tier.GPU_FULL
    sent = 0 if is_there else (bucket.ranks_per_node - 1) * bucket.node_bytes
    return steps.add(ops.intra_all_gather, [buffer], bucket.slots, sent)


def _scratch_bytes(bucket: Bucket, ctx: PassContext) -> int:
    """The bytes that a gather between nodes takes besides its input and result."""
    if bucket.wire is Format.FULL:
        sizes = bucket.sizes()
        return 0 if sizes is None else bucket.nodes * sizes[ctx.node] * bucket.itemsize
    # What is sent and received; and all decoded values, or the copy that differences are added to.
    bytes_ = (bucket.nodes + 1) * bucket.wire_bytes + bucket.node_bytes
    if bucket.wire is Format.DELTA:
        bytes_ += DIFFERENCE_SCRATCH_BYTES * bucket.slot_elements
    return bytes_


@dataclass(frozen=True, slots=True)
class _Steps:
    """Adds the steps of one bucket's gather; their results are on the device of `like`."""

    graph: Graph
    bucket: Bucket
    like: Node

    def add(
        self,
        op: Callable[..., Any],
        args: Sequence[Node],
        slots: int,
        sent_bytes: int,
        *,
        accessed_bytes: int = 0,
        scratch_bytes: int = 0,
    ) -> Node:
        """Insert a step whose result has `slots` slots."""
        elements, dtype = self.bucket.slot_elements * slots, getattr(torch, self.bucket.dtype)
        val = fake_flat(self.like, elements, dtype)
        return explicit(
            self.graph,
            op,
            args,
            self.bucket,
            sent_bytes,
            val,
            accessed_bytes=accessed_bytes,
            scratch_bytes=scratch_bytes,
        )

    def add_own(self, home: Node) -> Node:
        bucket, ranks = self.bucket, self.bucket.ranks_per_node
        is_encoded = not bucket.wire.is_exact
        scratch = bucket.wire_bytes + bucket.slot_bytes if is_encoded else 0
        op = ops.intra_own_all_gather
        return self.add(op, [home], ranks, self._own_bytes, scratch_bytes=scratch)

    def add_rest(self, node_shard: Node, own: Node) -> Node:
        bucket = self.bucket
        others = bucket.nodes - 1
        # A node with others before and after it puts their parts together; counted on every rank.
        together = others if others > 1 else 0
        return self.add(
            ops.intra_rest_all_gather,
            [node_shard, own],
            bucket.ranks,
            self._own_bytes * others,
            accessed_bytes=2 * bucket.full_bytes,  # read and written to put the parts in order
            scratch_bytes=(bucket.ranks_per_node * others + together) * bucket.slot_bytes,
        )

    @property
    def _own_bytes(self) -> int:
        return (self.bucket.ranks_per_node - 1) * self.bucket.slot_bytes


def _home(graph: Graph, bucket: Bucket, members: list[Node], like: Node, ctx: PassContext) -> Node:
    """Insert the home buffer [S]: packed by compute, or loaded if the home shards are in host memory."""
    layouts, dtype = [p.layout for p in bucket.params], getattr(torch, bucket.dtype)
    if ctx.specs[str(like.args[1])].computes_on is not None:
        elements = sum(layout.elements_of(ctx.node) for layout in layouts)
        val = fake_flat(like, elements, dtype)
        moved = elements * members[0].meta["val"].itemsize
        return explicit(graph, ops.load_home, members, bucket, moved, val, scratch_bytes=moved)
    (buffer,) = inline(
        graph,
        lambda s: [pack_home(s, layouts, dtype, ctx.node)],
        members,
        ctx.decompositions,
        {META: Packing(bucket=bucket.id)},
    )
    return buffer
