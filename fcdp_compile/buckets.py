"""Buckets from the parameters that they hold."""

from __future__ import annotations

from collections.abc import Sequence

from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.spec import bucket_strategy
from fcdp_compile.plan import Bucket, BucketParam
from fcdp_compile.strategy import Algorithm
from fcdp_compile.strategy.formats import Format


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
        strategy=bucket_strategy(specs[0], is_frozen=is_frozen),
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
