"""How collectives between nodes go: in two levels as planned, or as flat rings.

    as planned   inter_all_gather  W/g * (N-1)/N a rank, one after another or beside   intra_all_gather
    ring         one flat ring     W * (G-1)/G from rank to rank, and over each node's card

[Note: rings]
A flat ring passes each part on from rank to rank: (G-1) parts of W/G from each, and as many over the card of
a node, where two levels send (N-1) parts from each of its g ranks.  It is what one NCCL collective over all
ranks does, and leaves the full buffer: so the step within the node that follows a gather (or goes before a
reduce-scatter) is part of it.  An all-reduce is two such rounds.  Ranks that pass parts on use their links
within the node all the time.  What was planned as a ring (`flat_all_gather`) is one anyway.

[Note: latency]
The latency of `Machine.inter` is that of a whole gather between nodes, of N-1 hops; a ring has G-1, so it
takes (G-1)/(N-1) times as long to get going, as in `cost.gather_s`.  But a planned `flat_all_gather` costs
what `Machine.time_s` says, which does not know N and counts one latency, so that a plan takes the same time
here and wherever else it is put in time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan import Kind, Step
from fcdp_compile.plan.reduction import INTER_KINDS


class Collectives(Enum):
    """What runs between nodes; hierarchical: what was planned.  See [Note: rings]."""

    HIERARCHICAL = "hierarchical"
    RING = "ring"


_AFTER = (Kind.INTRA_ALL_GATHER, Kind.INTRA_REST_ALL_GATHER, Kind.INTRA_GRAD_ALL_GATHER)
_BEFORE = Kind.INTRA_REDUCE_SCATTER


def ring_bytes(step: Step, nodes: int, ranks_per_node: int) -> int:
    """Bytes that a collective between nodes sends over each node's card as a flat ring of N*g ranks.

    Raises: ValueError if the step does not send the same to each of N-1 others.
    """
    part_bytes, odd = divmod(step.bytes, nodes - 1)
    if odd:
        raise ArgumentError(
            f"step {step.index} ({step.kind.value}) sends {step.bytes} bytes, which are not {nodes - 1} "
            "equal parts; give simulate_step the nodes that it was planned for"
        )
    return part_bytes * (nodes * ranks_per_node - 1)


def within_rings(steps: Sequence[Step]) -> frozenset[int]:
    """Indices of the steps within a node that are part of a flat ring; steps: of one schedule."""
    return frozenset(index for step in steps for index in _parts_of(step, steps))


def _parts_of(step: Step, steps: Sequence[Step]) -> Iterator[int]:
    sources = [steps[i] for i in step.waits if steps[i].bucket == step.bucket]
    if step.kind in _AFTER and any(s.kind in INTER_KINDS for s in sources):
        yield step.index
        # HO-Ring's other half, which another path brings to the same place.
        yield from (s.index for s in sources if s.kind is Kind.INTRA_OWN_ALL_GATHER)
    if step.kind in INTER_KINDS:
        for source in sources:
            # What waited of earlier micro-batches is added on the way.
            added = source.waits if source.kind is Kind.COLLECT else (source.index,)
            yield from (i for i in added if steps[i].kind is _BEFORE)
