"""Predict the device memory of a whole step with every cached bucket on the host; no graph is changed.

    static      home shards, gradient shards, optimizer state, the caller's inputs and buffers
    positions   forward cold | forward warm | backward, node by node: `curve.Lifetimes` of each

`choose_tiers` then decides which cached buckets may stay on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from torch import Tensor
from torch.fx import Graph, GraphModule

from fcdp_compile.core.params.registry import STATE_BYTES, ParamSpec
from fcdp_compile.core.params.spec import may_leave
from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.describe import is_step
from fcdp_compile.passes.graph.context import PassContext, Use
from fcdp_compile.passes.memory.choose_tiers import Entry
from fcdp_compile.passes.memory.curve import (
    Alive,
    Bytes,
    Lifetimes,
    evaluate,
    hints_of,
    storages,
)
from fcdp_compile.plan import Bucket, Direction, Kind, Placement, Tier, Variant
from fcdp_compile.strategy import Cache


def left_bytes(forward: GraphModule, sizes: Mapping[sympy.Symbol, int], device_type: str) -> int:
    """The bytes that a forward leaves on the device: results and saved tensors, without its inputs.

    sizes: the values of its symbols, if they are not those that it was traced with.
    """
    inputs = storages(
        (n.meta.get("val") for n in forward.graph.find_nodes(op="placeholder")), device_type
    )
    values = [n.meta.get("val") for n in forward.graph.output_node().all_input_nodes]
    left = storages((v for v in values if isinstance(v, Tensor)), device_type)
    known = {**hints_of(forward), **sizes}
    return sum(evaluate(size, known) for s, size in left.items() if s not in inputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The input of `choose_tiers` for a step.  All sizes are bytes of one rank's device.

    steps: for each position, its schedule and the number of its step; None before the schedule's first step.
    """

    entries: tuple[Entry, ...]
    alive_bytes: tuple[int, ...]
    static_bytes: int
    steps: tuple[tuple[Direction, Variant, int | None], ...]

    def by_step(
        self, used_bytes: Sequence[int]
    ) -> dict[tuple[Direction, Variant], tuple[int, ...]]:
        """The most bytes used during each step of each schedule, from the bytes used at each position."""
        found: dict[tuple[Direction, Variant], list[int]] = {}
        for (direction, variant, step), used in zip(self.steps, used_bytes, strict=True):
            most = found.setdefault((direction, variant), [])
            if step is not None:
                most += [0] * (step + 1 - len(most))
                most[step] = max(most[step], used)
        return {key: tuple(most) for key, most in found.items()}


class MemoryPrediction:
    """A step's memory, predicted from its lowered graphs, for any sizes of its batch.

    graphs: the graphs before `lower`; they show which inputs are home shards.  placed: the buckets; those
    whose tier can be chosen become entries.

    accumulates: count gradient shards of earlier micro-batches beside those that a backward returns.
    """

    def __init__(
        self,
        graphs: Mapping[Direction, GraphModule],
        lowered: Mapping[tuple[Direction, Variant], GraphModule],
        placed: Sequence[Use],
        ctx: PassContext,
        *,
        device_type: str,
        accumulates: bool = True,
    ) -> None:
        self._ctx = ctx
        self._hints = {s: v for gm in graphs.values() for s, v in hints_of(gm).items()}
        inputs: dict[int, Bytes] = {}
        homes: set[int] = set()
        for direction, gm in graphs.items():
            homes |= _home_shards(gm.graph, device_type)
            if direction is not Direction.BACKWARD:
                values = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
                inputs |= storages(values, device_type)
        elsewhere = homes | set(inputs)
        self._others = [size for s, size in inputs.items() if s not in homes]
        self._lifetimes = {
            key: Lifetimes(gm, elsewhere=elsewhere, device_type=device_type)
            for key, gm in lowered.items()
        }
        self._reached = {key: _reached_steps(gm) for key, gm in lowered.items()}
        self._placed = [(use.bucket, use.placement) for use in placed]
        released = {p.name for b, at in self._placed for p in b.params if is_released(b, at, ctx)}
        self._fixed_bytes = sum(fixed_bytes(*pair) for pair in self._placed) + sum(
            _static(
                spec,
                frozen=key in ctx.frozen,
                is_away=spec.name in released,
                accumulates=accumulates,
            )
            for key, spec in ctx.specs.items()
        )

    def at(self, sizes: Mapping[sympy.Symbol, int]) -> StepMemory:
        """The memory for some values of the symbols in sizes; symbols without one have the traced value."""
        known = self._hints | dict(sizes)
        parts = {key: lifetimes.alive(known) for key, lifetimes in self._lifetimes.items()}
        return StepMemory(
            entries=tuple(_entries(parts, self._placed, self._ctx)),
            alive_bytes=tuple(a.bytes for part in parts.values() for a in part),
            steps=tuple(
                (*key, self._reached[key][a.at]) for key, part in parts.items() for a in part
            ),
            static_bytes=self._fixed_bytes + sum(evaluate(size, known) for size in self._others),
        )


def _reached_steps(gm: GraphModule) -> list[int | None]:
    """The number of the step that each node of a graph belongs to."""
    reached, count = [], 0
    for node in gm.graph.nodes:
        count += is_step(node)
        reached.append(count - 1 if count else None)
    return reached


def fixed_bytes(bucket: Bucket, placement: Placement) -> int:
    """Bytes that a bucket always keeps on the device; 0 if its tier can be chosen."""
    if bucket.strategy.cache is Cache.ADAPTIVE:
        return 0
    return {Tier.GPU: bucket.node_bytes, Tier.GPU_FULL: bucket.full_bytes}.get(placement.tier, 0)


def is_released(bucket: Bucket, placement: Placement, ctx: PassContext) -> bool:
    """Whether a bucket's home shards leave the device, because the cache has its node shard."""
    by_name = {spec.name: spec for spec in ctx.specs.values()}
    specs = [by_name[p.name] for p in bucket.params]
    return placement.is_cached and all(may_leave(s, is_frozen=bucket.frozen) for s in specs)


def _home_shards(graph: Graph, device_type: str) -> set[int]:
    nodes = graph.find_nodes(op="call_function", target=UNSHARD)
    return set(storages([n.args[0].meta.get("val") for n in nodes], device_type))


def _static(spec: ParamSpec, *, frozen: bool, is_away: bool, accumulates: bool) -> int:
    if spec.computes_on is not None:
        return 0
    home = spec.home_bytes
    if frozen:
        return 0 if is_away else home
    return (2 if accumulates else 1) * home + STATE_BYTES * math.prod(spec.local_shape)


def _entries(
    parts: Mapping[tuple[Direction, Variant], Sequence[Alive]],
    placed: Sequence[tuple[Bucket, Placement]],
    ctx: PassContext,
) -> list[Entry]:
    entries = []
    for bucket, placement in placed:
        if not placement.is_cached or bucket.strategy.cache is not Cache.ADAPTIVE:
            continue
        node_bytes = bucket.node_bytes
        mine = [
            [a.step for a in part if a.bucket == bucket.id]
            for (_, variant), part in parts.items()
            if variant is Variant.COLD or len(parts) == 1
        ]
        moves = sum(steps.count(k.value) for steps in mine for k in (Kind.STORE, Kind.LOAD))
        spreads = sum(
            steps.count(Kind.INTRA_ALL_GATHER.value)
            for steps in mine
            if Kind.INTER_ALL_GATHER.value not in steps
        )
        entries.append(
            Entry(
                bucket=bucket.id,
                bytes=node_bytes,
                moved_bytes=moves * bucket.host_bytes,
                full_bytes=_full_bytes(bucket),
                spread_bytes=spreads * (bucket.ranks_per_node - 1) * node_bytes,
                spans=tuple(_spans(bucket, parts)),
            )
        )
    return entries


def _full_bytes(bucket: Bucket) -> int | None:
    """Bytes of a bucket beyond its node shard; None if there are none, or if they must not be kept."""
    if bucket.ranks_per_node == 1 or not bucket.strategy.may_keep_full:
        return None
    return bucket.full_bytes - bucket.node_bytes


def _spans(
    bucket: Bucket, parts: Mapping[tuple[Direction, Variant], Sequence[Alive]]
) -> list[tuple[int, int]]:
    """When the cache holds the bucket: always if it outlives the step, else from its store to its load."""
    spans, start = [], 0
    for (direction, _), part in parts.items():
        end = start + len(part)
        mine = {a.step: start + i for i, a in enumerate(part) if a.bucket == bucket.id}
        if bucket.strategy.is_resident:
            spans.append((start, end))
        elif direction is Direction.BACKWARD:
            spans.append((start, mine.get(Kind.LOAD.value, end)))
        elif Kind.STORE.value in mine:
            spans.append((mine[Kind.STORE.value], end))
        start = end
    return [s for s in spans if s[0] < s[1]]
