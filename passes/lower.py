"""Replace the two traced ops by explicit communication nodes."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from fcdp_compile import ops
from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.gather_params import gather_params
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.graph.explicit import erase_unused, explicit, wait_for
from fcdp_compile.passes.graph.views import is_view
from fcdp_compile.passes.reduce_grads import reduce_grads
from fcdp_compile.plan import Bucket


def lower(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Replace each `unshard` and `reduce_grad` by explicit communication nodes.

        GATHER            shards -> pack [S] -> inter_all_gather [N*S] -> intra_all_gather -> wait [G*S]
                          -> unpack -> parameters ... last use -> free
        GATHER_AND_STORE  the same, and the node shard [N*S] -> store ... end of graph -> wait
        LOAD              load [N*S] -> intra_all_gather -> wait [G*S] -> unpack -> parameters ... free
        HOME              shards -> pack [S] -> intra_all_gather -> ...
          with ho_ring    shards -> pack [S] -> inter_all_gather [N*S], intra_own_all_gather [g*S]
                          -> intra_rest_all_gather -> wait [G*S] -> ...
        gradients         pack [G*S] -> intra_reduce_scatter [N*S] -> inter_reduce_scatter -> wait [S]
                          -> unpack -> gradient shards
          that accumulate pack [G*S] -> intra_reduce_scatter [N*S] -> collect -> accumulate -> wait
                          negative zeros -> gradient shards
          that collect    pack [G*S] -> intra_reduce_scatter [N*S] -> collect -> inter_reduce_scatter ...

    Gradients accumulate at the strategy's scope.  The table shows scope `intra`; with scope `none`, whole
    gradients accumulate before anything is reduced.  If there are several copies of the parameters, a
    reduction has other steps (`plan.reduction`).

    [Note: negative zeros] They are returned for gradients that wait.  Adding them changes no gradient, not
    even a zero, and they can be told from the zeros that `zero_grad` writes (`gradient_marks`).

    Steps on other lanes read each other's results without a `wait`; only compute waits for them.  Everything
    is placed just in time: gathers before the first use of the bucket, reductions after its last gradient.
    The collective of a group of one rank is left out; a single rank has no explicit nodes (`lower_alone`).

    Requires: `choose_sources`; equal keys read the same shard (`set_apart`).
    Leaves: no `unshard`, no `reduce_grad`; a `free` after the last use of each gathered bucket; a `StepMeta`
    on every explicit node.  A loaded bucket has no inter-node all-gather in this graph.
    """
    if ctx.ranks == 1:
        return lower_alone(gm, ctx)
    gather_alone(gm.graph, ctx)
    _merge_unshards(gm.graph)
    _sink_unshards(gm.graph)
    stores: list[Node] = []
    gathered: dict[Bucket, Node] = {}
    for bucket, nodes in _by_bucket(gm.graph, ctx).items():
        buffer = gather_params(gm.graph, bucket, nodes, stores, ctx)
        if buffer is not None:
            gathered[bucket] = buffer
    _free(gm.graph, gathered)
    reduce_grads(gm.graph, ctx)
    with gm.graph.inserting_before(gm.graph.output_node()):
        for pending in stores:
            wait_for(gm.graph, pending)
    gm.recompile()
    return gm


def _merge_unshards(graph: Graph) -> None:
    """Keep one `unshard` for each key: two reads of a parameter (a tied weight) share one gather."""
    first: dict[object, Node] = {}
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        kept = first.setdefault(node.args[1], node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            erase_unused([node])


def _sink_unshards(graph: Graph) -> None:
    """Move each `unshard` before its first user: recomputation may put it at the top of a backward."""
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        if node.users:
            min(node.users).prepend(node)
        else:
            erase_unused([node])


def _by_bucket(graph: Graph, ctx: PassContext) -> dict[Bucket, list[Node]]:
    groups: dict[Bucket, list[Node]] = {}
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        groups.setdefault(ctx.uses[str(node.args[1])].bucket, []).append(node)
    return groups


def _free(graph: Graph, gathered: dict[Bucket, Node]) -> None:
    for bucket, buffer in gathered.items():
        last = max(_uses_of_storage(buffer))
        if last.op == "output":
            continue  # the model returns a parameter: the caller frees it
        with graph.inserting_after(last):
            explicit(graph, ops.free, [buffer], bucket, 0)


def _uses_of_storage(node: Node) -> list[Node]:
    """A value, its users, and the users of all its views."""
    uses = [node]
    for user in node.users:
        uses.append(user)
        if is_view(user):
            uses += _uses_of_storage(user)
    return uses


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
        if ctx.specs[str(node.args[1])].layout.ranks > 1:
            continue
        with graph.inserting_before(node):
            _replace(node, _cast(graph, node.args[0], node.meta["val"].dtype))


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
