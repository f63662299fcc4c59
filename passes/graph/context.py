"""What a pass may read besides its graph, and the one record it leaves on nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import sympy
from torch.fx import Node

from fcdp_compile.cluster.free_memory import HostBudget
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.passes.graph.inline import Inliner
from fcdp_compile.plan import Bucket, Direction, Placement, Step, Variant
from fcdp_compile.plan.cost import MACHINES, Machine

META = "fcdp"
"""The one key of fcdp in node meta; its value is one of the records below."""


class Source(Enum):
    """How a graph comes by a bucket's node shard."""

    HOME = "home"  # one node only: the home shard is the node shard
    GATHER = "gather"  # between nodes, used and forgotten
    GATHER_AND_STORE = "gather-and-store"
    LOAD = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """On an `unshard` node: the bucket it belongs to, where that waits, and how the graph comes by it.

    source: None before `choose_sources`.
    """

    bucket: Bucket
    placement: Placement
    source: Source | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeta:
    """On an explicit node: its step, before the schedule numbers it.

    scratch_bytes: the device memory that it takes while it is on its way, besides its input and result.
    """

    step: Step
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """On compute that lines up the home shards of a bucket: which one, so that it stays by itself."""

    bucket: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """Read-only input of every pass.

    nodes, ranks_per_node: of the mesh; those that share one copy of a bucket are the bucket's.
    specs: of every parameter of the model, by key.  frozen: keys of those that need no gradient now.
    known: the buckets that parameters are in already, by key; for a backward the one of its forward first,
    which its gradients are reduced in, for others those that forwards made.  placements: of all known
    buckets, by number.  next_bucket: the first unused
    bucket number.  bucket_bytes: a bucket is full when its gathered parameters take this many bytes; None:
    as many as the link between nodes of `machine` asks for.
    host_budget: what the node shards on the host may take, None without a limit.
    in_flight_bytes: how many bytes of gathered parameters and of gradients on their way may be alive at
    once (`schedule` [Note: in-flight budget]); None for what `schedule` finds sensible.
    backward_buckets: ids of the buckets that the backward of this graph uses.
    sizes: values of symbols (batch, sequence length), where they are not those that they were traced with.
    inliner: inserts functions, decomposed as the compiler of the segments wants it.
    """

    nodes: int
    ranks_per_node: int
    specs: Mapping[str, ParamSpec]
    frozen: frozenset[str]
    known: Mapping[str, tuple[Bucket, ...]]
    next_bucket: int
    bucket_bytes: int | None = None
    machine: Machine = MACHINES["cpu"]
    in_flight_bytes: int | None = None
    host_budget: HostBudget | None = None
    direction: Direction = Direction.FORWARD
    variant: Variant = Variant.COLD
    backward_buckets: tuple[int, ...] = ()
    sizes: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    inliner: Inliner = field(default_factory=Inliner)
    placements: Mapping[int, Placement] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """All ranks of the mesh."""
        return self.nodes * self.ranks_per_node


def use_of(node: Node) -> Use:
    """The record that `bucket` left on an `unshard` node."""
    use = node.meta.get(META)
    assert isinstance(use, Use), f"{node} belongs to no bucket; run `bucket` first"
    return use
