"""The spec of a parameter on a mesh: arithmetic that needs neither the mesh nor the parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fcdp_compile.core.params.inner_cut import InnerCut
from fcdp_compile.core.params.layout import ParamLayout, choose_dim
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.errors import ArgumentError
from fcdp_compile.strategy import Scope, Strategy
from fcdp_compile.strategy.gathering import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """The nodes and ranks per node that one copy of the parameters is cut over, and this rank's position."""

    nodes: int
    ranks_per_node: int
    node: int
    place: int

    @property
    def ranks(self) -> int:
        """How many ranks share one copy."""
        return self.nodes * self.ranks_per_node

    @property
    def rank(self) -> int:
        """This rank's number among them, counted node by node."""
        return self.node * self.ranks_per_node + self.place

    def of(self, scope: Scope) -> Home:
        """The position of this rank of a whole mesh among the ranks that share one copy in this scope."""
        return Home(
            nodes=self.nodes if scope is Scope.GLOBAL else 1,
            ranks_per_node=1 if scope is Scope.NONE else self.ranks_per_node,
            node=self.node if scope is Scope.GLOBAL else 0,
            place=0 if scope is Scope.NONE else self.place,
        )


def fit_strategy(strategy: Strategy, mesh: Home, *, shares_memory: bool) -> Strategy:
    """Adapt a strategy to the number of nodes and of ranks per node, and to the memory that there is.

    mesh: this rank among all ranks.  shares_memory: whether the GPU's memory is the host's.

    Raises: ValueError if the strategy makes no sense there.
    """
    if shares_memory:
        strategy = strategy.without_host()
    if strategy.offloads and mesh.of(strategy.home).ranks == 1:
        raise ArgumentError(
            f"strategy {strategy} offloads home shards, but here every rank has all parameters; use more "
            "ranks on a node, a strategy that shards over all ranks, or fcdp_compile.offload(optimizer)"
        )
    if mesh.nodes > 1:
        if mesh.ranks_per_node == 1:  # there is only one link, so only one way to gather
            strategy = replace(strategy, algorithm=Algorithm.HIERARCHICAL)
        is_whole = mesh.of(strategy.home).ranks == 1
        return strategy.without_cache() if is_whole else strategy
    if strategy.home is Scope.INTRA and mesh.ranks > 1:
        raise ArgumentError(
            f"strategy {strategy.name!r} shards within a node and replicates over nodes, but there is one "
            "node; use 'zero3', which shards over all ranks, or make_mesh(nodes=…)"
        )
    return strategy.on_one_node(mesh.ranks_per_node)


def param_spec(
    key: str,
    name: str,
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    strategy: Strategy,
    mesh: Home,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    is_packed: bool = False,
    home_node: int | None = None,
    inner: InnerCut | None = None,
    kept_dim: int | None = None,
) -> ParamSpec:
    """The spec of a parameter with this shape on this rank of the mesh.

    shape: of the part that this rank has if the parameter is cut over a "tp" group (inner).
    kept_dim: a dimension that is not cut, None to choose among all.

    param_dtype, reduce_dtype: of computation and of reductions; None: the parameter's own dtype.
    is_packed: whether it is a part of a quantised weight, which is cut between rows and sent as it is.
    home_node: the node that owns all rows (`home_nodes`), or None.
    """
    home = mesh.of(strategy.home)
    # Parts may differ in size; ranks that share a parameter cut the same dimension of it.
    largest = shape if inner is None else inner.part_shape(0)
    layout = ParamLayout.of(largest, home.nodes, home.ranks_per_node, home_node)
    if kept_dim is not None:
        dim = choose_dim(largest, home.nodes, home.ranks_per_node, but=kept_dim)
        layout = replace(layout, dim=dim)
    layout = replace(layout, shape=shape)
    # Only parameters with home nodes share buckets with each other.
    strategy = replace(strategy, whole_matrices=home_node is not None)
    if home_node is not None:
        strategy = strategy.with_exact_weights()
    if is_packed:
        layout = replace(layout, dim=0)
        param_dtype = reduce_dtype = None
        strategy = strategy.with_exact_weights()
    gathers_as = param_dtype if param_dtype and dtype.is_floating_point else dtype
    reduces_as = reduce_dtype if reduce_dtype and dtype.is_floating_point else gathers_as
    return ParamSpec(
        key=key,
        name=name,
        layout=layout,
        home_dtype=dtype,
        gather_dtype=gathers_as,
        reduce_dtype=reduces_as,
        local_shape=layout.local_shape(home.node, home.place),
        strategy=strategy,
        is_packed=is_packed,
        inner=inner,
    )
