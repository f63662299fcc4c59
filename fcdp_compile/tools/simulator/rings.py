"""How collectives between nodes run: in two levels as planned, or as flat rings.

    as planned   inter_all_gather  W/g * (N-1)/N a rank, one after another or beside   intra_all_gather
    ring         one flat ring     W * (G-1)/G from rank to rank, and over each node's card

[Note: rings]
A flat ring passes each part on from rank to rank.  Each rank sends (G-1) parts of W/G, and as many cross each
node's card; with two levels, each of a node's g ranks sends (N-1) parts.  One NCCL collective over all ranks
does this, and leaves the full buffer: so it includes the step within the node that follows a gather (or comes
before a reduce-scatter).  An all-reduce is two such rounds.  Ranks that pass parts on use their links within
the node all the time.

[Note: latency]
The latency of `Machine.inter` is that of a whole gather between nodes, of N-1 hops; a ring has G-1, so its
latency is (G-1)/(N-1) times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan import Kind, Step
from fcdp_compile.plan.kinds import INTER_KINDS


class Collectives(Enum):
    """The collectives between nodes; hierarchical: as planned.  See [Note: rings]."""

    HIERARCHICAL = "hierarchical"
    RING = "ring"


_AFTER = (Kind.INTRA_ALL_GATHER, Kind.INTRA_REST_ALL_GATHER, Kind.INTRA_GRAD_ALL_GATHER)
_BEFORE = Kind.INTRA_REDUCE_SCATTER


def ring_bytes(step: Step, nodes: int, ranks_per_node: int) -> int:
    """Return the bytes that a collective sends over each node's card as a flat ring of N*g ranks.

    Raises: ValueError if the step does not send equal parts to each of N-1 others.
    """
    part_bytes, odd = divmod(step.bytes, nodes - 1)
    if odd:
        raise ArgumentError(
            f"step {step.index} ({step.kind.value}) sends {step.bytes} bytes, which are not {nodes - 1} "
            "equal parts; give simulate_step the nodes that it was planned for"
        )
    return part_bytes * (nodes * ranks_per_node - 1)


def within_rings(steps: Sequence[Step]) -> frozenset[int]:
    """Return the indices of the steps within a node that are part of a flat ring; steps: of one schedule."""
    return frozenset(index for step in steps for index in _parts_of(step, steps))


def _parts_of(step: Step, steps: Sequence[Step]) -> Iterator[int]:
    sources = [steps[i] for i in step.waits if steps[i].bucket == step.bucket]
    if step.kind in _AFTER and any(s.kind in INTER_KINDS for s in sources):
        yield step.index
        # The other half of HO-Ring, which reaches this buffer on another path.
        yield from (s.index for s in sources if s.kind is Kind.INTRA_OWN_ALL_GATHER)
    if step.kind in INTER_KINDS:
        for source in sources:
            # Gradients of earlier micro-batches are added in between.
            added = source.waits if source.kind is Kind.COLLECT else (source.index,)
            yield from (i for i in added if steps[i].kind is _BEFORE)
