"""Give traced graphs a strategy and a mesh: the sizes of home shards and of their gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import GraphModule

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import Home, param_spec, with_home
from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.graph.views import changes_nothing, same_values
from fcdp_compile.passes.pipeline import Graphs
from fcdp_compile.passes.variants import clone
from fcdp_compile.plan import Direction
from fcdp_compile.strategy import Strategy
from fcdp_compile.strategy.home_nodes import home_nodes
from fcdp_compile.tools.planner.traced import TracedGraph, TracedModel

DEVICE = torch.device("cpu")
"""Graphs are traced with fake tensors of the CPU, for all devices."""


def specs_of(traced: TracedModel, strategy: Strategy, mesh: Home) -> dict[str, ParamSpec]:
    """Return the spec of every parameter, by key.

    strategy: as fitted to the mesh.
    """
    matrices = [p for p in traced.params if p.is_matrix and strategy.whole_matrices]
    nodes = home_nodes([(p.shape, p.dtype.itemsize) for p in matrices], mesh.nodes)
    homes = dict(zip([p.key for p in matrices], nodes, strict=True))
    specs = {
        p.key: param_spec(
            p.key,
            p.name,
            shape=p.shape,
            dtype=p.dtype,
            strategy=strategy,
            mesh=mesh,
            param_dtype=p.gather_dtype,
            is_packed=p.is_packed,
            home_node=homes.get(p.key),
            kept_dim=p.kept_dim,
        )
        for p in traced.params
    }
    return {
        p.key: with_home(specs[p.key], DEVICE, is_frozen=not p.requires_grad) for p in traced.params
    }


def retarget(graph: TracedGraph, specs: Mapping[str, ParamSpec]) -> Graphs:
    """Return copies of a graph's forward and backward with the home shards and gradients of a mesh.

    specs: of every parameter on the mesh, by key.
    """
    return {
        Direction.FORWARD: _resized(graph.forward, specs),
        Direction.BACKWARD: _resized(graph.backward, specs),
    }


def _resized(gm: GraphModule, specs: Mapping[str, ParamSpec]) -> GraphModule:
    resized = clone(gm)
    for node in resized.graph.find_nodes(op="call_function", target=UNSHARD):
        shape = specs[str(node.args[1])].local_shape
        home = node.args[0]
        for seen in [same_values(home), home]:
            if tuple(seen.meta["val"].shape) != shape:
                seen.meta["val"] = seen.meta["val"].new_empty(shape)
    for node in resized.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        for seen in [*filter(changes_nothing, node.users), node]:
            seen.meta["val"] = node.meta["val"].new_empty(specs[str(node.args[1])].local_shape)
    return resized
