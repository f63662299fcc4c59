"""Replace gathers and reductions by casts if a rank has whole parameters."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.graph.context import PassContext


def lower_alone(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace each `unshard` by its shard, which is the parameter, and each `reduce_grad` by its gradient.

        shard [P] -> unshard -> mm            shard [P] (-> cast to the gather dtype) -> mm
        mm -> reduce_grad -> output           mm (-> casts to the reduce and home dtype) -> output

    A returned parameter is copied, because the caller may write to it.

    Requires: one rank.
    Leaves: no `unshard`, no `reduce_grad` and no explicit node, so that compute is as in an unsharded model.
    """
    assert ctx.ranks == 1, f"{ctx.ranks} ranks must reduce"
    graph = gm.graph
    gather_alone(graph, ctx)
    for node in graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        spec = ctx.specs[str(node.args[1])]
        with graph.inserting_before(node):
            reduced = _cast(graph, node.args[0], spec.reduce_dtype)
            _replace(node, _cast(graph, reduced, spec.home_dtype))
    gm.recompile()
    return gm


def gather_alone(graph: Graph, ctx: PassContext) -> None:
    """Replace each `unshard` of a parameter that one rank has whole by its shard; a part of `lower`."""
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        spec = ctx.specs[str(node.args[1])]
        if spec.layout.ranks > 1:
            continue
        with graph.inserting_before(node):
            _replace(node, _cast(graph, node.args[0], spec.gather_dtype))


def _cast(graph: Graph, node: Node, dtype: torch.dtype) -> Node:
    value = node.meta["val"]
    if value.dtype is dtype:
        return node
    cast = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    cast.meta = {**node.meta, "val": value.to(dtype)}
    return cast


def _replace(node: Node, by: Node) -> None:
    graph, output = node.graph, node.graph.output_node()
    if node.target is UNSHARD and output in node.users and by is node.args[0]:
        with graph.inserting_before(output):
            copy = graph.call_function(torch.ops.aten.clone.default, (by,))
        copy.meta = dict(by.meta)
        output.replace_input_with(node, copy)
    node.replace_all_uses_with(by)
    graph.erase_node(node)
