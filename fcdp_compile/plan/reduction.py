"""The steps that average gradients over all ranks and bring them to the home shards.

    home global   intra_reduce_scatter [N*S]  inter_reduce_scatter [S]
    home intra    intra_reduce_scatter [S]    inter_all_reduce [S]
    home none     intra_reduce_scatter [P/g]  inter_all_reduce [P/g]  intra_grad_all_gather [P]

Between nodes, an all-reduce sends as many bytes as home global's reduce-scatter and all-gather of weights.
Sources: ZeRO++ (Wang et al., 2023) and MiCS (Zhang et al., 2022), section 3.4, for the two levels.
"""

from __future__ import annotations

from fcdp_compile.plan import Kind, Lane
from fcdp_compile.strategy import Scope

REDUCTIONS: dict[Scope, tuple[Kind, ...]] = {
    Scope.GLOBAL: (Kind.INTRA_REDUCE_SCATTER, Kind.INTER_REDUCE_SCATTER),
    Scope.INTRA: (Kind.INTRA_REDUCE_SCATTER, Kind.INTER_ALL_REDUCE),
    Scope.NONE: (
        Kind.INTRA_REDUCE_SCATTER,
        Kind.INTER_ALL_REDUCE,
        Kind.INTRA_GRAD_ALL_GATHER,
    ),
}
"""The steps of a reduction by the scope of home shards; steps over a group of one rank are left out."""


def waits_before(kind: Kind, gradient: Scope) -> bool:
    """Whether gradients of micro-batches wait before this step of a reduction.

    gradient: the strategy's scope of accumulated gradients.
    """
    done = Scope.INTRA if kind.lane is Lane.INTER else Scope.NONE
    return gradient is done and kind is not Kind.INTRA_GRAD_ALL_GATHER


def all_reduce_bytes(elements: int, itemsize: int, size: int) -> int:
    """Bytes that each of `size` ranks sends to the others: for a reduce-scatter and an all-gather."""
    return 2 * (size - 1) * -(-elements // size) * itemsize
