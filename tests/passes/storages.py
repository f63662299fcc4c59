"""Which tensors of a lowered graph share memory, found by running the graph on zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fcdp_compile import ops


def storages(gm: GraphModule) -> dict[Node, int]:
    """A number for each tensor's storage; results of explicit nodes have storages of their own."""
    # Not on fake tensors: with torch 2.13 a view of an empty fake tensor sometimes has its own storage.
    env: dict[Node, Any] = {}
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        if node.op != "call_function" or node.target in ops.EXPLICIT:
            is_tensor = isinstance(val, Tensor)
            env[node] = torch.zeros(val.shape, dtype=val.dtype) if is_tensor else None
        else:
            env[node] = node.target(*map_arg(node.args, env.get), **node.kwargs)
    return {n: v.untyped_storage()._cdata for n, v in env.items() if isinstance(v, Tensor)}
