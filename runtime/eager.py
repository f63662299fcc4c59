"""Gather or reduce one parameter outside of compiled graphs, without buckets, schedule and cache."""

from __future__ import annotations

import torch
from torch import Tensor

from fcdp_compile.params.mesh import Topology
from fcdp_compile.params.packing import pack_grads, pack_home, padded, unpack_full, unpack_grads
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.plan import Kind
from fcdp_compile.plan.reduction import REDUCTIONS
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
        """Gather a parameter in a dtype from this rank's `shard`, into new memory."""
        layouts = [spec.layout]
        sizes = (spec.layout.nodes, spec.layout.ranks_per_node)
        if max(sizes) > 1:
            same_act(self._collectives, gathers(spec))
        pending = Pending(pack_home([shard], layouts, dtype))
        for kind, size in zip((Kind.INTER_ALL_GATHER, Kind.INTRA_ALL_GATHER), sizes, strict=True):
            if size > 1:
                pending = self._collectives.all_gather(kind, pending, _range_name(kind, spec))
        full = unpack_full(pending.wait(), layouts)[0]
        # An op must not return its input; `full` is the input if nothing was gathered or cast.
        return full.clone() if full.data_ptr() == shard.data_ptr() else full

    def reduce(self, spec: ParamSpec, grad: Tensor) -> Tensor:
        """Average a full gradient over all ranks and return this rank's shard of it."""
        topology = self._topology
        if topology.ranks > 1:
            same_act(self._collectives, f"reduces the gradient of parameter {spec.name!r}")
        packed = pack_grads([grad], [spec.layout], spec.reduce_dtype)
        if spec.strategy.home is Scope.NONE:
            packed = padded(packed, topology.ranks_per_node)
        pending = Pending(packed)
        for kind in REDUCTIONS[spec.strategy.home]:
            if self._collectives.group_size(kind) > 1:
                pending = self._collectives.reduction(kind, pending, _range_name(kind, spec))
        whole = pending.wait()
        shard = unpack_grads(whole, [spec.layout], [spec.local_shape], [spec.home_dtype])[0]
        return shard.clone() if shard.data_ptr() == grad.data_ptr() else shard


def gathers(spec: ParamSpec) -> str:
    """The text by which ranks compare that all of them gather this parameter."""
    return f"gathers parameter {spec.name!r}"


def _range_name(kind: Kind, spec: ParamSpec) -> str:
    return f"fcdp::{kind.value} {spec.key}"
