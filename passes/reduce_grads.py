"""Replace reductions of gradients by explicit communication nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fcdp_compile import ops
from fcdp_compile.core.params.packing import (
    is_narrow,
    narrow_sum_bytes,
    pack_grads,
    padded,
    unpack_grads,
)
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.ops import REDUCE_GRAD
from fcdp_compile.passes.graph.context import PassContext, Use
from fcdp_compile.passes.graph.explicit import erase_unused, explicit, wait_for
from fcdp_compile.passes.graph.inline import inline
from fcdp_compile.passes.graph.views import is_cast, same_values
from fcdp_compile.plan import Bucket, Tier, Variant
from fcdp_compile.plan.kinds import INTER_KINDS
from fcdp_compile.plan.reduction import REDUCTIONS, all_reduce_bytes, waits_before
from fcdp_compile.strategy.formats import Format, row_bytes


def reduce_grads(graph: Graph, ctx: PassContext) -> None:
    """Replace each `reduce_grad` by the steps of its bucket's reduction; a part of `lower`.

    [Note: gradients in a lower dtype] Gradients that compute makes in a lower dtype, as under autocast, cross
    within the node in it.  The sum of the node is taken in fp32, so it has the same bits.
    """
    nodes = graph.find_nodes(op="call_function", target=REDUCE_GRAD)
    _sink_results(graph, nodes)
    groups: dict[Use, list[Node]] = {}
    for node in nodes:
        groups.setdefault(ctx.reduced[str(node.args[1])], []).append(node)
    for use, members in groups.items():
        by_position = {p.name: i for i, p in enumerate(use.bucket.params)}
        members.sort(key=lambda n: by_position[ctx.specs[str(n.args[1])].name])
        _reduce_bucket(graph, use, members, ctx)


def _sink_results(graph: Graph, reductions: list[Node]) -> None:
    """Move reductions and the nodes that depend on them to the end, so that a bucket is reduced at once."""
    moved = dict.fromkeys(reductions)
    for node in graph.nodes:
        if node.op != "output" and any(a in moved for a in node.all_input_nodes):
            moved[node] = None
    end = graph.output_node()
    for node in [n for n in graph.nodes if n in moved]:
        end.prepend(node)


def _reduce_bucket(graph: Graph, use: Use, members: list[Node], ctx: PassContext) -> None:
    specs: list[ParamSpec] = [ctx.specs[str(n.args[1])] for n in members]
    layouts = [s.layout for s in specs]
    bucket, dtype = use.bucket, getattr(torch, use.bucket.reduce_dtype)
    grads: list[Node] = [n.all_input_nodes[0] for n in members]
    steps = _reduction_steps(use, ctx, is_on_host=specs[0].computes_on is not None)
    computed = [_before_cast(g) for g in grads]
    sent = computed[0].meta["val"].dtype
    if _crosses_as(sent, computed, dtype) and steps and steps[0][0] is ops.intra_reduce_scatter:
        grads, dtype = computed, sent  # [Note: gradients in a lower dtype]
    with graph.inserting_before(_after(max(grads))):
        together = ctx.ranks_per_node // bucket.ranks_per_node
        (packed,) = inline(
            graph,
            lambda g: [padded(pack_grads(g, layouts, dtype), together)],
            grads,
            ctx.decompositions,
        )
        reduced = _reduce_packed(graph, use, packed, specs, steps, ctx)
    with graph.inserting_before(min(members)):
        shapes, homes = [s.local_shape for s in specs], [s.home_dtype for s in specs]
        if _variant(use, ctx) is Variant.ACCUMULATE:
            shards = [_negative_zeros(graph, packed, s) for s in specs]
        else:
            shards = inline(
                graph,
                lambda b: unpack_grads(b[0], layouts, shapes, homes, ctx.node),
                [reduced],
                ctx.decompositions,
            )
    for node, result in zip(members, shards, strict=True):
        node.replace_all_uses_with(result)
        erase_unused([node])


def _before_cast(grad: Node) -> Node:
    """A gradient as it was before the graph cast it from bf16 or fp16 to a wider dtype."""
    cast = same_values(grad)
    if not is_cast(cast):
        return grad
    (before,) = cast.all_input_nodes
    low, wide = before.meta["val"].dtype, cast.meta["val"].dtype
    return before if is_narrow(low) and wide.itemsize > low.itemsize else grad


def _crosses_as(sent: torch.dtype, grads: Sequence[Node], reduces: torch.dtype) -> bool:
    """Whether gradients can cross in bf16 or fp16, and be reduced in fp32."""
    is_one = all(g.meta["val"].dtype is sent for g in grads)
    return is_one and is_narrow(sent) and reduces is torch.float32


def _reduce_packed(
    graph: Graph,
    use: Use,
    packed: Node,
    specs: Sequence[ParamSpec],
    steps: Iterable[tuple[Callable[..., Any], int]],
    ctx: PassContext,
) -> Node:
    """Insert the steps of a reduction and a wait for the last step; return the reduced buffer."""
    bucket, dtype = use.bucket, getattr(torch, use.bucket.reduce_dtype)
    wide = torch.promote_types(dtype, torch.float32)
    slots = [s.layout.slot_elements for s in specs]
    names = tuple(s.name for s in specs)
    elements = int(packed.meta["val"].numel())
    buffer, pending = packed, None  # type: Node, Node | None
    for op, size in steps:
        sent: torch.dtype = buffer.meta["val"].dtype
        moved, result, mean = (size - 1) * elements * sent.itemsize, dtype, None
        scratch = _scratch_bytes(op, bucket, slots, elements, size)
        if sent is not dtype:
            scratch = elements * sent.itemsize  # the parts of all ranks
        if op in (ops.collect, ops.accumulate):
            on_host = use.placement.gradient_tier is Tier.HOST
            moved = elements * wide.itemsize if on_host else 0
            result = wide if _variant(use, ctx) is Variant.ACCUMULATE else dtype
        elif op is ops.inter_reduce_scatter:
            sizes = bucket.sizes(names)
            crossing = row_bytes(slots, bucket.reduce_wire, bucket.reduce_itemsize)
            moved = (size - 1) * crossing if sizes is None else (size - 1) * crossing // size
            if sizes is not None:
                mean = elements // size * dtype.itemsize
            elements = elements // size if sizes is None else sizes[ctx.node]
            if sizes is not None:  # the parts of all nodes
                summed = wide.itemsize if is_narrow(dtype) else 0
                scratch = elements * (size * bucket.reduce_itemsize + summed)
        elif op is ops.store_grads:
            result = specs[0].home_dtype
            moved = elements * result.itemsize
        elif op is ops.intra_reduce_scatter:
            moved //= size
            elements //= size
        elif op is ops.inter_all_reduce:
            moved = all_reduce_bytes(elements, bucket.reduce_itemsize, size)
        else:
            elements *= size
        device = "cpu" if op is ops.store_grads else None  # else that of the gradients
        val = packed.meta["val"].new_empty(elements, dtype=result, device=device)
        buffer = pending = explicit(
            graph, op, [buffer], bucket, moved, val, scratch_bytes=scratch, mean_bytes=mean
        )
        pending.kwargs = {**pending.kwargs, "params": names}
    return buffer if pending is None else wait_for(graph, pending)


def _scratch_bytes(
    op: Callable[..., Any], bucket: Bucket, slots: Sequence[int], elements: int, size: int
) -> int:
    """The bytes that a step takes besides its input and result.  elements: of its input."""
    dtype = getattr(torch, bucket.reduce_dtype)
    if op is ops.inter_reduce_scatter and bucket.reduce_wire is not Format.FULL:
        encoded = size * row_bytes(slots, bucket.reduce_wire, bucket.reduce_itemsize)
        wide = torch.promote_types(dtype, torch.float32).itemsize
        return 2 * encoded + (elements + elements // size) * wide
    if op is ops.inter_all_reduce:
        part = -(-elements // size) * bucket.reduce_itemsize
        return part + narrow_sum_bytes(dtype, elements, size)
    sums = op in (ops.intra_reduce_scatter, ops.inter_reduce_scatter)
    return narrow_sum_bytes(dtype, elements, size) if sums else 0


def _variant(use: Use, ctx: PassContext) -> Variant:
    """The variant for a bucket's gradients: cold, if they have no place to wait."""
    return ctx.variant if use.placement.accumulates else Variant.COLD


def _reduction_steps(
    use: Use, ctx: PassContext, *, is_on_host: bool
) -> list[tuple[Callable[..., Any], int]]:
    """The ops of a bucket's reduction in order, each with the size of its group.

    is_on_host: whether home shards are in host memory.
    """
    steps: list[tuple[Callable[..., Any], int]] = []
    variant, strategy = _variant(use, ctx), use.bucket.strategy
    for kind in REDUCTIONS[strategy.home]:
        is_here = waits_before(kind, strategy.gradient)
        if is_here and variant is Variant.ACCUMULATE:
            return [*steps, (ops.collect, 1), (ops.accumulate, 1)]
        if is_here and variant is Variant.COLLECT:
            steps.append((ops.collect, 1))
        size = ctx.nodes if kind in INTER_KINDS else ctx.ranks_per_node
        if size > 1:
            steps.append((_OPS[kind], size))
    return [*steps, (ops.store_grads, 1)] if is_on_host else steps


_OPS = {kind: op for op, kind in ops.EXPLICIT.items() if kind is not None}


def _negative_zeros(graph: Graph, like: Node, spec: ParamSpec) -> Node:
    """Insert a gradient shard of negative zeros, see [Note: negative zeros]."""
    device = spec.home_device(like.meta["val"].device)
    val = like.meta["val"].new_empty(spec.local_shape, dtype=spec.home_dtype, device=device)
    options = {"dtype": spec.home_dtype, "device": val.device, "pin_memory": False}
    node = graph.call_function(torch.ops.aten.full.default, (spec.local_shape, -0.0), options)
    node.meta["val"] = val
    return node


def _after(node: Node) -> Node:
    """The first node after `node` that is neither an input nor a `free`."""
    following = node.next
    while following.op == "placeholder" or following.target is ops.free:
        following = following.next
    return following
