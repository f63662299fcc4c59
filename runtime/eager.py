"""Gather or reduce one parameter outside of compiled graphs, without buckets, schedule and cache."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fcdp_compile.params.layout import sizes_by_node
from fcdp_compile.params.mesh import Topology
from fcdp_compile.params.packing import pack_grads, pack_home, padded, unpack_full, unpack_grads
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.plan import Kind
from fcdp_compile.plan.reduction import REDUCTIONS, waits_before
from fcdp_compile.runtime.cache.home_transfers import grad_to_home, shard_to_device
from fcdp_compile.runtime.collectives.agreement import same_act
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.lanes.pending import Pending
from fcdp_compile.strategy import Scope


class Eager:
    """Collectives of one parameter at a time, for code that has no plan.

    [Note: what is compared] Without a plan, two ranks may gather different parameters of one size, and would
    both get a mixture of the two.  So before each collective, ranks compare which parameter it is for.

    Raises, where it communicates: PlanMismatchError on every rank if ranks are about to do different things.
    """

    def __init__(self, topology: Topology, collectives: Collectives) -> None:
        self._topology = topology
        self._collectives = collectives

    def gather(self, spec: ParamSpec, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather a parameter in a dtype from this rank's `shard`, also on the host, into new memory."""
        collectives = self._collectives
        shard = shard_to_device(spec, shard, collectives.device, collectives.counters)
        layouts = [spec.layout]
        sizes = (spec.layout.nodes, spec.layout.ranks_per_node)
        if max(sizes) > 1:
            same_act(self._collectives, gathers(spec))
        pending = Pending(pack_home([shard], layouts, dtype, self._topology.node))
        for kind, size in zip((Kind.INTER_ALL_GATHER, Kind.INTRA_ALL_GATHER), sizes, strict=True):
            if size > 1:
                name, parts = _range_name(kind, spec), _sizes(kind, spec)
                pending = self._collectives.all_gather(kind, pending, name, sizes=parts)
        full = unpack_full(pending.wait(), layouts)[0]
        # An op must not return its input; `full` is the input if nothing was gathered or cast.
        return full.clone() if full.data_ptr() == shard.data_ptr() else full

    def reduce(
        self, spec: ParamSpec, grad: Tensor, collect: Callable[[Pending], Pending] | None = None
    ) -> Tensor:
        """Average a full gradient over all ranks and return this rank's shard of it.

        collect: adds the gradients that wait, where they wait.
        """
        if self._topology.ranks > 1:
            same_act(self._collectives, f"reduces the gradient of parameter {spec.name!r}")
        pending = self._packed(spec, grad)
        for kind in REDUCTIONS[spec.strategy.home]:
            if collect is not None and waits_before(kind, spec.strategy.gradient):
                pending = collect(pending)
            pending = self._reduced(kind, spec, pending)
        whole = pending.wait()
        layouts, shapes, dtypes = [spec.layout], [spec.local_shape], [spec.home_dtype]
        shard = unpack_grads(whole, layouts, shapes, dtypes, self._topology.node)[0]
        shard = grad_to_home(spec, shard, self._collectives.counters)
        return shard.clone() if shard.data_ptr() == grad.data_ptr() else shard

    def reduce_to_wait(self, spec: ParamSpec, grad: Tensor) -> Pending:
        """Average a full gradient over the ranks of its strategy's gradient scope, where it waits."""
        same_act(self._collectives, f"accumulates the gradient of parameter {spec.name!r}")
        pending = self._packed(spec, grad)
        for kind in REDUCTIONS[spec.strategy.home]:
            if waits_before(kind, spec.strategy.gradient):
                break
            pending = self._reduced(kind, spec, pending)
        return pending

    def _packed(self, spec: ParamSpec, grad: Tensor) -> Pending:
        packed = pack_grads([grad], [spec.layout], spec.reduce_dtype)
        if spec.strategy.home is Scope.NONE:
            packed = padded(packed, self._topology.ranks_per_node)
        return Pending(packed)

    def _reduced(self, kind: Kind, spec: ParamSpec, pending: Pending) -> Pending:
        if self._collectives.group_size(kind) == 1:
            return pending
        name, sizes = _range_name(kind, spec), _sizes(kind, spec)
        return self._collectives.reduction(kind, pending, name, sizes=sizes)


def gathers(spec: ParamSpec) -> str:
    """The text by which ranks compare that all of them gather this parameter."""
    return f"gathers parameter {spec.name!r}"


def _sizes(kind: Kind, spec: ParamSpec) -> tuple[int, ...] | None:
    scatters = kind in (Kind.INTER_ALL_GATHER, Kind.INTER_REDUCE_SCATTER)
    return sizes_by_node([spec.layout]) if scatters else None


def _range_name(kind: Kind, spec: ParamSpec) -> str:
    return f"fcdp::{kind.value} {spec.key}"
