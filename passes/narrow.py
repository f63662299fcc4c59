"""Gather parameters in the dtype that a graph uses them in."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fcdp_compile.core.params.packing import is_narrow
from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.graph.views import is_cast, is_view
from fcdp_compile.torch_compat import tree_map_only


def narrow(gm: GraphModule, but: Collection[str] = ()) -> GraphModule:
    """Let each parameter that a graph only casts to a lower dtype be gathered in this dtype.

        unshard(w) -> to_copy(bfloat16) -> t -> mm        unshard(w, bfloat16) -> t -> mm
        unshard(w) -> t -> to_copy(bfloat16) -> mm        unshard(w, bfloat16) -> t -> mm

    Autocast, the `bf16=True` of most Trainers, makes such graphs.  A cast gives each element the same bits
    before a gather as after it.  What the graph also uses in the parameter's own dtype, such as the weight of
    a norm, is gathered in that.  In a joint graph, the forward and the backward count as one.

    but: keys to leave alone: no rounded copy lets their home shards leave the device.

    Requires: `set_apart`.
    Leaves: the dtype as the third argument of an `unshard`, the same for all reads of a key.
    """
    reads: dict[str, list[Node]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
        reads.setdefault(str(node.args[1]), []).append(node)
    for nodes in [nodes for key, nodes in reads.items() if key not in but]:
        views, casts = _views_and_casts(nodes)
        dtypes = {cast.meta["val"].dtype for cast in casts}
        if len(dtypes) == 1:
            (dtype,) = dtypes
            home, wide = (n.meta["val"].dtype for n in (nodes[0].all_input_nodes[0], nodes[0]))
            # What the gather rounds, the cast rounds again: one cast from the home dtype differs.
            if is_narrow(dtype) and dtype.itemsize < wide.itemsize >= home.itemsize:
                _gather_as(dtype, nodes, views, casts)
    gm.recompile()
    return gm


def _views_and_casts(reads: list[Node]) -> tuple[list[Node], list[Node]]:
    """The reads and all views of them, and the casts of these; no casts if there is any other use."""
    views, casts = [*reads], []  # type: list[Node], list[Node]
    for node in views:  # grows; a view views one node, so none comes twice
        for user in node.users:
            if is_cast(user):
                casts.append(user)
            elif _is_same_dtype(user):
                views.append(user)
            else:
                return views, []
    return views, casts


def _is_same_dtype(node: Node) -> bool:
    """Whether a node is a view of its one input, with the same dtype."""
    return (
        node.op == "call_function"
        and len(node.all_input_nodes) == 1
        and is_view(node)
        and node.target is not torch.ops.aten.view.dtype
    )


def _gather_as(dtype: torch.dtype, reads: list[Node], views: list[Node], casts: list[Node]) -> None:
    for read in reads:
        read.args = (*read.args[:2], dtype)
    for node in views:
        node.meta = {**node.meta, "val": tree_map_only(Tensor, _cast(dtype), node.meta["val"])}
    for cast in casts:
        cast.replace_all_uses_with(cast.all_input_nodes[0])
        cast.graph.erase_node(cast)


def _cast(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda val: val.new_empty_strided(val.shape, val.stride(), dtype=dtype)
