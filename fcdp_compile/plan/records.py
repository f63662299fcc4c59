"""The plan, as data: what a compiled graph communicates, when, and why.

A plan is made at compile time without running or communicating anything, is the same on every rank (but
see `Placement`), serialises to JSON (`plan.json`), and says for every step what it moves and what it waits
for.  The executed graph has the same steps, one to one.

Letters: N nodes, g ranks per node, G = N*g ranks that share one copy of a bucket, whose slot is P/G elements
of `dtype`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from fcdp_compile.core.params.layout import ParamLayout, sizes_by_node
from fcdp_compile.plan.kinds import Kind, Lane
from fcdp_compile.strategy import Algorithm, Scope, Strategy
from fcdp_compile.strategy.formats import Format, row_bytes

SCHEMA = "fcdp.plan/9"


INNER = "intra (model)"
"""The name, for people, of what the model itself sends within the node: no lane, but its link."""


class Tier(Enum):
    """Where a bucket's node shard waits between its uses; gpu-full: the whole bucket, on the GPU."""

    NONE = "none"
    HOST = "host"
    GPU = "gpu"
    GPU_FULL = "gpu-full"


class Direction(Enum):
    """Which graph of a training step a schedule belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


class Variant(Enum):
    """Of a forward, cold: trainable buckets have changed, gather them; warm: load what has a copy.

    Of a backward, cold: reduce gradients to the home shards; accumulate: keep them at the strategy's scope,
    as within `no_sync`; collect: reduce them together with those that accumulated before.

    Of both, given: gather values that are not the model's own, without buckets and caches; no plan has it
    (`passes.set_apart`).
    """

    COLD = "cold"
    WARM = "warm"
    ACCUMULATE = "accumulate"
    COLLECT = "collect"
    GIVEN = "given"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketParam:
    """One parameter of a bucket: qualified name, layout, and where its slot starts in the bucket's slot.

    offset: elements of the bucket's dtype.
    """

    name: str
    layout: ParamLayout
    offset: int


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Parameters that are sent together; all ranks must agree on every field but `why`.

    id: number within the model. strategy: of its parameters. dtype: of all-gathers.
    reduce_dtype: of reduce-scatters. frozen: none of its parameters requires a gradient. wire, reduce_wire:
    the formats between nodes in all-gathers and reduce-scatters. host_format: the format of node shards in
    host memory. algorithm: of gathers between nodes.
    why: the reason for its composition, for people; it does not count when buckets are compared.
    """

    id: int
    params: tuple[BucketParam, ...]
    strategy: Strategy
    dtype: str
    itemsize: int
    reduce_dtype: str
    reduce_itemsize: int
    frozen: bool
    wire: Format
    reduce_wire: Format
    host_format: Format
    algorithm: Algorithm
    why: str = field(compare=False, repr=False)

    @property
    def nodes(self) -> int:
        """N: the nodes that share one copy."""
        return self.params[0].layout.nodes

    @property
    def ranks_per_node(self) -> int:
        """g: the ranks of each of these nodes that share one copy."""
        return self.params[0].layout.ranks_per_node

    @property
    def ranks(self) -> int:
        """G: the ranks that share one copy."""
        return self.nodes * self.ranks_per_node

    @cached_property
    def slot_elements(self) -> int:
        """P/G: elements of one slot, padding included; of matrices with home nodes: of all slots, P/g."""
        return sum(p.layout.slot_elements for p in self.params)

    @property
    def slots_per_node_shard(self) -> int:
        """How many slots a node shard has: N, or one if matrices have home nodes."""
        return self.params[0].layout.slots_per_node_shard

    @property
    def slots(self) -> int:
        """How many slots the gathered bucket has."""
        return self.params[0].layout.slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, padding included."""
        return self.slot_elements * self.itemsize

    def sizes(self, names: Collection[str] | None = None) -> tuple[int, ...] | None:
        """How many elements a rank of each node contributes; None if all nodes equally many.

        names: of some of the parameters; None for all.
        """
        return sizes_by_node([p.layout for p in self.params if names is None or p.name in names])

    @property
    def wire_bytes(self) -> int:
        """Bytes that one rank sends to each other node; the mean of all nodes if matrices have home nodes."""
        row = row_bytes(self._slots, self.wire, self.itemsize)
        return row * self.slots_per_node_shard // self.nodes

    @property
    def node_bytes(self) -> int:
        """Bytes of the node shard, W/g."""
        return self.slot_bytes * self.slots_per_node_shard

    @property
    def host_bytes(self) -> int:
        """Bytes of the node shard in host memory."""
        return row_bytes(self._slots, self.host_format, self.itemsize) * self.slots_per_node_shard

    @property
    def waiting_gradient_bytes(self) -> int:
        """Bytes on one rank of the bucket's accumulated gradients, in fp32 or wider."""
        is_whole = self.strategy.gradient is Scope.NONE
        slots = self.slots if is_whole else self.slots_per_node_shard
        return self.slot_elements * slots * max(4, self.reduce_itemsize)

    @property
    def _slots(self) -> list[int]:
        return [p.layout.slot_elements for p in self.params]

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered bucket, W."""
        return self.slot_bytes * self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a bucket and its gradients wait; this may differ by rank.

    Whether anything waits is the same on all ranks; each rank chooses for itself between the GPU and the
    host.

    bucket: its number. tier: where its copy waits between its uses. gradient_tier: where gradients of
    micro-batches wait for the micro-batch that synchronises; none: each is reduced to the home shards. why:
    the reason for the tier, for people.
    """

    bucket: int
    tier: Tier
    gradient_tier: Tier
    why: str

    @property
    def is_cached(self) -> bool:
        """Whether anything of the bucket waits between its uses."""
        return self.tier is not Tier.NONE

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for the micro-batch that synchronises."""
        return self.gradient_tier is not Tier.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a schedule.

    index: position.  bytes: that this rank sends over the link, or is planned to copy over H2D or D2H; 0 for
    steps that move nothing.  waits: indices of the steps whose results it needs.  flops, accessed_bytes: the
    work of a compute step, floating point operations and bytes read and written; for a gather, the bytes read
    and written to put parts in order.  kernel_bytes: bytes that kernels of other libraries in a compute step
    read and write, such as those that dequantise weights; they run beside nothing.  inner_bytes: bytes that
    this rank sends within its node in collectives of the model itself, which are parts of compute steps.
    label: a name for people.
    """

    index: int
    kind: Kind
    lane: Lane
    bucket: int | None
    bytes: int
    waits: tuple[int, ...]
    flops: int = 0
    accessed_bytes: int = 0
    kernel_bytes: int = 0
    inner_bytes: int = 0
    label: str = ""

    @property
    def compared(self) -> tuple[Kind, int | None, int]:
        """The values that ranks must agree on: kind, bucket, and bytes sent between ranks.

        The bytes of an intra-node all-gather do not count: its bucket implies them, and ranks agree at run
        time whether it is needed at all (`runtime.buckets.bucket_cache` [Note: full parameters]).
        """
        by_placement = self.lane in (Lane.H2D, Lane.D2H) or self.kind is Kind.INTRA_ALL_GATHER
        return self.kind, self.bucket, 0 if by_placement else self.bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The ordered steps of one graph in one variant.

    in_flight_bytes: the most bytes of gathered parameters and of gradients on their way that are alive at
    once (`passes.schedule` [Note: in-flight budget]).  memory_bytes: for each step the most device memory
    that is predicted to be in use during it; empty if nobody predicted it.
    """

    direction: Direction
    variant: Variant
    steps: tuple[Step, ...]
    in_flight_bytes: int = 0
    memory_bytes: tuple[int, ...] = ()

    def bytes_by_kind(self) -> dict[Kind, int]:
        """Bytes that one run moves, by kind; kinds that move nothing are left out."""
        totals: dict[Kind, int] = {}
        for step in self.steps:
            if step.bytes:
                totals[step.kind] = totals.get(step.kind, 0) + step.bytes
        return totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that one compiled graph will do.

    graph: number of the compilation within the model.  placements: one for each bucket, in the order of the
    buckets.  refresh: buckets that must be valid in the cache before the forward starts; a stale bucket is
    gathered between nodes and stored first.  peak_bytes: the most device memory that a step is predicted to
    take with the buckets in these tiers; None if it was not predicted.
    memory_limit_bytes: an adaptive cache may let the peak grow to this; None without such a limit.
    strategy: the names of its buckets' strategies, for people.  nodes, ranks_per_node: of the mesh.
    Ranks may disagree on the graph number, on memory, and on which tiers are on the GPU or the host.
    """

    strategy: str
    nodes: int
    ranks_per_node: int
    graph: int
    buckets: tuple[Bucket, ...]
    placements: tuple[Placement, ...]
    refresh: tuple[int, ...]
    schedules: tuple[Schedule, ...]
    peak_bytes: int | None = None
    memory_limit_bytes: int | None = None

    def bucket(self, bucket_id: int) -> Bucket:
        """The bucket with this number; KeyError if there is none."""
        for bucket in self.buckets:
            if bucket.id == bucket_id:
                return bucket
        raise KeyError(f"plan has no bucket {bucket_id}")

    @property
    def placed(self) -> list[tuple[Bucket, Placement]]:
        """Each bucket with its placement."""
        return list(zip(self.buckets, self.placements, strict=True))

    def placement(self, bucket_id: int) -> Placement:
        """The placement of the bucket with this number; KeyError if there is none."""
        for placement in self.placements:
            if placement.bucket == bucket_id:
                return placement
        raise KeyError(f"plan has no placement of bucket {bucket_id}")

    def digest(self) -> str:
        """A hash of everything that ranks must agree on before they communicate.

        Compute steps do not count: a rank that recompiled for dynamic shapes communicates the same.
        """
        parts: list[object] = [SCHEMA, self.strategy, self.nodes, self.ranks_per_node, self.refresh]
        parts += self.buckets
        parts += [(p.bucket, p.is_cached, p.accumulates) for p in self.placements]
        for schedule in self.schedules:
            parts.append((schedule.direction, schedule.variant))
            parts += [s.compared for s in schedule.steps if s.kind is not Kind.COMPUTE]
        return hashlib.sha256(repr(parts).encode()).hexdigest()
