"""Buckets from the parameters that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.plan import Bucket, BucketParam
from fcdp_compile.strategy import Strategy
from fcdp_compile.strategy.formats import CODINGS, Format
from fcdp_compile.strategy.gathering import Algorithm


def exact_bucket(number: int, specs: Sequence[ParamSpec], *, is_frozen: bool, why: str) -> Bucket:
    """A bucket that sends and keeps exact values, gathered hierarchically.

    number: its id; -1 if no plan has it.
    specs: its parameters, in order; they agree in dtypes and strategy.  Those with home nodes are put in the
    order of these nodes, so that a node shard has each node's part in one piece.
    """
    params, offset = [], 0
    for spec in sorted(specs, key=lambda s: s.layout.home_node or 0):
        params.append(BucketParam(name=spec.name, layout=spec.layout, offset=offset))
        offset += spec.layout.slot_elements
    gathered, reduced = specs[0].gather_dtype, specs[0].reduce_dtype
    return Bucket(
        id=number,
        params=tuple(params),
        strategy=fitted(specs[0], is_frozen=is_frozen),
        dtype=str(gathered).removeprefix("torch."),
        itemsize=gathered.itemsize,
        reduce_dtype=str(reduced).removeprefix("torch."),
        reduce_itemsize=reduced.itemsize,
        frozen=is_frozen,
        wire=Format.FULL,
        reduce_wire=Format.FULL,
        host_format=Format.FULL,
        algorithm=Algorithm.HIERARCHICAL,
        why=why,
    )


def fitted(spec: ParamSpec, *, is_frozen: bool) -> Strategy:
    """The strategy of a parameter's bucket.

    On one node, where a home shard is its own node shard, a copy on the host is of use only if the home shard
    then leaves the device.
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
    is_exact = dtype == spec.gather_dtype and wire_format(sent, dtype) is Format.FULL
    is_here = spec.computes_on is None
    return is_frozen and is_here and is_exact and strategy.keeps_on_host and strategy.is_resident


def with_home(spec: ParamSpec, device: torch.device, *, is_frozen: bool) -> ParamSpec:
    """The spec with the home shard where its strategy wants it.

    device: for computation.
    """
    offloads = spec.strategy.offloads and not may_leave(spec, is_frozen=is_frozen)
    return replace(spec, computes_on=device) if offloads else spec


def wire_format(wanted: Format, dtype: torch.dtype) -> Format:
    """The wanted format if it makes a whole block of the dtype smaller, else `FULL`.

    Only the dtype decides, so a parameter has the same values in its own bucket as in a shared bucket.
    """
    if wanted is Format.FULL or not dtype.is_floating_point:
        return Format.FULL
    return wanted if CODINGS[wanted].value_bytes < dtype.itemsize else Format.FULL
