"""Find out which nodes of a graph are views of other nodes, and what nodes are computed from."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable

import torch
from torch.fx import Graph, Node

from fcdp_compile.torch_compat import OpOverload


def is_view(node: Node) -> bool:
    """Whether a node's result shares memory with an argument."""
    if node.target is operator.getitem:  # a piece of what split, unbind or chunk return
        return is_view(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload):
        return False
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    return any(r.alias_info is not None for r in node.target._schema.returns)


_CASTS = (
    torch.ops.aten._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)


def is_cast(node: Node) -> bool:
    """Whether a node gives each element another dtype, and does nothing else."""
    if node.target not in _CASTS:
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(before.device == after.device and before.stride() == after.stride())


_SAME_ORDER = (
    torch.ops.aten.view.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
)
"""Views whose elements are in the same order as before."""


def changes_nothing(node: Node) -> bool:
    """Whether a node is a view with the same shape and order as its base, such as `to_local`'s."""
    if node.op != "call_function" or node.target not in _SAME_ORDER:
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return tuple(before.shape) == tuple(after.shape)


def same_values(node: Node) -> Node:
    """Follow views that change nothing back to the node that they view."""
    while changes_nothing(node):
        node = node.all_input_nodes[0]
    return node


def computed_from(nodes: Iterable[Node]) -> list[Node]:
    """These nodes and all that they are computed from, in order."""
    found: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in found:
            for source in node.all_input_nodes:
                visit(source)
            found[node] = None

    for node in nodes:
        visit(node)
    return list(found)


def copy_returned(graph: Graph, parameters: Collection[Node]) -> None:
    """Let a graph return copies of parameters and of their views, because the caller may write to them."""
    output = graph.output_node()
    copies: dict[Node, Node] = {}
    for returned in output.all_input_nodes:
        chain = _chain(returned, parameters)
        if chain[0] not in parameters:
            continue
        with graph.inserting_before(output):
            for source, node in zip([None, *chain], chain, strict=False):
                if node in copies:
                    continue
                if source is None:
                    copies[node] = graph.call_function(torch.ops.aten.clone.default, (node,))
                else:
                    copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
                copies[node].meta = dict(node.meta)
        output.replace_input_with(returned, copies[returned])


def _chain(node: Node, parameters: Collection[Node]) -> list[Node]:
    """The chain of views that ends at `node`, oldest first.

    It begins with a parameter, or with the first node that is not a view.
    """
    chain = [node]
    while node not in parameters and node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
        chain.append(node)
    return chain[::-1]
