"""Replace the two traced ops by explicit communication nodes."""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from fcdp_compile import ops
from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.gather_params import erase_unused, gather_params
from fcdp_compile.passes.graph.context import PassContext
from fcdp_compile.passes.graph.explicit import explicit, wait_for
from fcdp_compile.passes.graph.views import is_view
from fcdp_compile.passes.reduce_grads import reduce_grads
from fcdp_compile.passes.single_rank import gather_alone, lower_alone
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
    order = {n: i for i, n in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        if node.users:
            min(node.users, key=order.__getitem__).prepend(node)
        else:
            erase_unused([node])


def _by_bucket(graph: Graph, ctx: PassContext) -> dict[Bucket, list[Node]]:
    groups: dict[Bucket, list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is UNSHARD:
            groups.setdefault(ctx.uses[str(node.args[1])].bucket, []).append(node)
    return groups


def _free(graph: Graph, gathered: dict[Bucket, Node]) -> None:
    order = {n: i for i, n in enumerate(graph.nodes)}
    for bucket, buffer in gathered.items():
        last = max(_uses_of_storage(buffer), key=order.__getitem__)
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
