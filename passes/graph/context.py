"""The input of a pass besides its graph, and the records that passes leave on nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from fcdp_compile.cluster.free_memory import HostBudget
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.passes.graph.inline import Decompositions
from fcdp_compile.plan import Bucket, Direction, Placement, Step, Variant
from fcdp_compile.plan.cost import MACHINES, Machine

META = "fcdp"
"""The only key of fcdp in a node's `meta`; its value is one of the records below."""


class Source(Enum):
    """How a graph gets a bucket's node shard."""

    HOME = "home"  # one node only: the home shard is the node shard
    GATHER = "gather"  # between nodes, not kept
    GATHER_AND_STORE = "gather-and-store"
    LOAD = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A bucket, where it waits, and how a graph gets it.

    source: None before `choose_sources`.
    """

    bucket: Bucket
    placement: Placement
    source: Source | None = None


Uses = Mapping[str, Use]
"""The buckets of a graph's parameters, by key, in the order of the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeta:
    """The record on an explicit node: its step, before the schedule numbers it.

    scratch_bytes: device memory that the running step takes besides its input and result.
    mean_bytes: of the result, over all nodes, if nodes differ; for decisions that all ranks make alike.
    """

    step: Step
    scratch_bytes: int = 0
    mean_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The record on nodes that pack a bucket's home shards, so that they become one segment."""

    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """Read-only input of every pass.

    nodes, ranks_per_node: the size of the mesh; a `Bucket` has fields with these names that count only the
    ranks that share one copy of the bucket.  node: this rank's node.
    specs: of every parameter of the model, by key, with the gather dtype that the graphs use.
    frozen: keys of the parameters that need no gradient now.
    known: the buckets that hold a parameter already, by key.  For a backward, its forward's comes first; for
    other graphs, buckets that only a backward made are left out.  next_bucket: the first unused number.
    uses: of the parameters that the graph gathers, once `bucket` has run; `choose_sources` adds sources.
    reduced: of the parameters whose gradients the graph reduces.
    bucket_bytes: a bucket is full when its gathered parameters take this many bytes; None: a size that suits
    the link between nodes of `machine`.
    host_budget: host memory that node shards may take; None without a limit.
    delta_bits: bits of a 16-bit weight that is sent as a difference; 16 is the most.
    in_flight_bytes: how many bytes of gathered parameters and of gradients on their way may be alive at
    once (`schedule` [Note: in-flight budget]); None for the default of `schedule`.
    backward_buckets: ids of the buckets that the backward of this graph uses.
    sizes: values of symbols (batch, sequence length) that differ from the traced values.
    inner_ranks: how many ranks each group within a node has in which the model itself communicates, by name.
    decompositions: those that AOTAutograd uses for the compiler of the segments.
    """

    nodes: int
    ranks_per_node: int
    node: int
    specs: Mapping[str, ParamSpec]
    frozen: frozenset[str]
    known: Mapping[str, tuple[Use, ...]]
    next_bucket: int
    bucket_bytes: int | None = None
    machine: Machine = MACHINES["cpu"]
    in_flight_bytes: int | None = None
    host_budget: HostBudget | None = None
    delta_bits: float = 16
    direction: Direction = Direction.FORWARD
    variant: Variant = Variant.COLD
    backward_buckets: tuple[int, ...] = ()
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    decompositions: Decompositions = field(default_factory=dict)
    uses: Uses = field(default_factory=dict)
    reduced: Uses = field(default_factory=dict)
    inner_ranks: Mapping[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """All ranks of the mesh."""
        return self.nodes * self.ranks_per_node

    def serving(self, key: str) -> list[Use]:
        """The known buckets of a parameter that are gathered in its gather dtype."""
        dtype = self.specs[key].gather_dtype
        return [u for u in self.known.get(key, ()) if getattr(torch, u.bucket.dtype) is dtype]


def keys_of(gm: GraphModule, op: Callable[..., Any]) -> list[str]:
    """The keys that a graph calls `unshard` or `reduce_grad` with, in the order of the graph."""
    nodes = gm.graph.find_nodes(op="call_function", target=op)
    return list(dict.fromkeys(str(n.args[1]) for n in nodes))


def buckets_of(uses: Uses) -> list[Bucket]:
    """The buckets in order of first use."""
    return list(dict.fromkeys(use.bucket for use in uses.values()))
