"""Which nodes of a graph are views of others."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

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
