"""The spec of a parameter on a mesh, and its strategy; needs neither the mesh nor the parameter.

    what the user has asked for
    on_hosts           home shards in host memory, if the user wants it or GPUs are full
    fit_strategy       what the number of nodes and ranks leaves of it
    param_spec         `ParamSpec.strategy`: matrices with a home node and quantised weights go unchanged
    bucket_strategy    `Bucket.strategy`: on one node, no copy on the host that would not free the home shard

No other module changes a strategy after `shard` has assigned one to each parameter.  A bucket has the formats
that make its dtype smaller (`wire_format`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from fcdp_compile.core.params.inner_cut import InnerCut
from fcdp_compile.core.params.layout import ParamLayout, choose_dim
from fcdp_compile.core.params.packing import is_narrow
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.errors import ArgumentError
from fcdp_compile.strategy import Algorithm, Scope, Strategy
from fcdp_compile.strategy.formats import CODINGS, Format

K = TypeVar("K")


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


def on_hosts(
    strategies: Mapping[K, Strategy], mesh: Home, *, where_possible: bool = False
) -> dict[K, Strategy]:
    """The strategies with home shards in host memory.

    mesh: this rank among all ranks.  where_possible: leave strategies as they are that have no home shards
    here.

    Raises: ArgumentError for a strategy without home shards, else.
    """
    return {
        key: strategy
        if where_possible and mesh.of(strategy.home).ranks == 1
        else replace(strategy, offloads=True)
        for key, strategy in strategies.items()
    }


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
        strategy = replace(strategy, host_format=Format.FULL, frozen_format=Format.FULL)
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


def bucket_strategy(spec: ParamSpec, *, is_frozen: bool) -> Strategy:
    """The strategy of a parameter's bucket.

    On one node the home shard is the node shard: cache it on the host only to free the shard.
    """
    strategy = spec.strategy
    is_copy = spec.layout.nodes > 1 or not strategy.keeps_on_host
    return strategy if is_copy or may_leave(spec, is_frozen=is_frozen) else strategy.without_cache()


def may_leave(spec: ParamSpec, *, is_frozen: bool) -> bool:
    """Whether a home shard leaves the device while the cache has its node shard.

    So the node shard is kept until it changes, perhaps on the host, and has the exact values.
    """
    strategy, dtype = spec.strategy, spec.home_dtype
    sent, _ = strategy.formats(is_frozen=True)
    is_exact = dtype == spec.gather_dtype and wire_format(sent, dtype).is_exact
    is_here = spec.computes_on is None
    return is_frozen and is_here and is_exact and strategy.keeps_on_host and strategy.is_resident


def with_home(spec: ParamSpec, device: torch.device, *, is_frozen: bool) -> ParamSpec:
    """The spec with the home shard where its strategy wants it.

    device: for computation.
    """
    offloads = spec.strategy.offloads and not may_leave(spec, is_frozen=is_frozen)
    return replace(spec, computes_on=device) if offloads else spec


def wire_format(wanted: Format, dtype: torch.dtype) -> Format:
    """The wanted format if it makes values of the dtype smaller, else `FULL`.

    Only the dtype decides, so a parameter has the same values in its own bucket as in a shared bucket.
    """
    if wanted is Format.FULL or not dtype.is_floating_point:
        return Format.FULL
    if wanted is Format.DELTA:
        return wanted if is_narrow(dtype) else Format.FULL
    return wanted if CODINGS[wanted].value_bytes < dtype.itemsize else Format.FULL
