"""Find the transfers of a lowered graph: which explicit nodes belong together, and what they keep alive.

Not a pass; `schedule` moves these transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META
from fcdp_compile.passes.graph.views import computed_from
from fcdp_compile.plan.kinds import FETCHES

_GATHERS = tuple(op for op, kind in ops.EXPLICIT.items() if kind in FETCHES)
_REDUCTIONS = tuple(
    op
    for op, kind in ops.EXPLICIT.items()
    if kind is not None and kind.flow is not None and not kind.flow.is_of_weights
)
"""The steps of gathers and those of gradients, which no `wait` is between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """The gather of a bucket, in up to two stages.

    pack: nodes that pack the bucket's home shards, from inputs alone.  fetch: the first of two stages: loads
    and inter-node all-gather, steps beside it, and the store; empty if there is one stage.  spread: the stage
    that makes full parameters; the intra-node all-gather if there are two stages.  wait: the wait for the
    last step.  ends: the wait for the store, and the free; the bucket is alive until these.  fetched_bytes,
    full_bytes: bytes of the stages' results.
    """

    pack: tuple[Node, ...]
    fetch: tuple[Node, ...]
    spread: tuple[Node, ...]
    wait: Node
    ends: tuple[Node, ...]
    fetched_bytes: int
    full_bytes: int

    @property
    def starts(self) -> tuple[Node, ...]:
        """All steps in order."""
        return (*self.fetch, *self.spread)

    @property
    def bytes(self) -> int:
        """Bytes of node shard and full parameters."""
        return self.fetched_bytes + self.full_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A bucket's gradients on their way to the home shards, or to the place where they accumulate.

    starts: reduce-scatters, and the steps that add and keep accumulated gradients, in order.  wait: the wait
    for the last step.  packed_bytes: bytes of the packed gradients, which the first step reads.
    reduced_bytes: bytes of the first step's result.
    """

    starts: tuple[Node, ...]
    wait: Node
    packed_bytes: int
    reduced_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes alive until the first half is done."""
        return self.packed_bytes + self.reduced_bytes


def find_gathers(graph: Graph) -> list[Gather]:
    """The gathers of a lowered graph in the order in which compute waits for them."""
    return [_gather(w, c) for w, c in _waits(graph) if c[-1].target in _GATHERS]


def find_reductions(graph: Graph) -> list[Reduction]:
    """The reductions of a lowered graph in the order in which compute waits for them."""
    return [
        Reduction(
            starts=tuple(chain),
            wait=wait,
            packed_bytes=_nbytes(chain[0].all_input_nodes[0]),
            reduced_bytes=_nbytes(chain[0]),
        )
        for wait, chain in _waits(graph)
        if chain[-1].target in _REDUCTIONS and _next(chain[-1], _REDUCTIONS) is None
    ]


def _gather(wait: Node, chain: list[Node]) -> Gather:
    """The gather that ends with a wait; chain: its steps, in order.

    The node shard is what is stored: with one node the home buffer (`before`), with one rank per node the
    result of the only step (`last`), else the result of the first step (`early`).
    """
    before = [s for n in chain[0].all_input_nodes if (s := _next(n, (ops.store,))) is not None]
    early = [s for n in chain[:-1] if (s := _next(n, (ops.store,))) is not None]
    last = [] if (s := _next(chain[-1], (ops.store,))) is None else [s]
    two_stages = len(chain) > 1
    beside = [n for n in chain[-1].all_input_nodes if n is not chain[-2]] if two_stages else []
    ends = [w for s in (*before, *early, *last) if (w := _next(s, (ops.wait,))) is not None]
    if (free := _next(wait, (ops.free,))) is not None:
        ends.append(free)
    full = _nbytes(wait)
    return Gather(
        pack=_pack(chain[0]),
        fetch=(*chain[:-1], *beside, *early) if two_stages else (),
        spread=(chain[-1], *last) if two_stages else (*before, chain[0], *last),
        wait=wait,
        ends=tuple(ends),
        fetched_bytes=sum(map(_nbytes, (*chain[:-1], *beside))) if two_stages else 0,
        full_bytes=full,
    )


def _waits(graph: Graph) -> list[tuple[Node, list[Node]]]:
    """The waits of a graph, each with the steps that it ends (`_chain`)."""
    return [(w, _chain(w)) for w in graph.find_nodes(op="call_function", target=ops.wait)]


def _chain(wait: Node) -> list[Node]:
    """The steps that a wait ends, in order; each reads the result of the step before it without a wait."""
    chain: list[Node] = []
    node: Node | None = wait.all_input_nodes[0]
    while node is not None and node.target in ops.EXPLICIT and node.target is not ops.wait:
        chain.insert(0, node)
        node = next(iter(node.all_input_nodes), None)
    return chain


def _next(node: Node, targets: tuple[Callable[..., Any], ...]) -> Node | None:
    return next((u for u in node.users if u.target in targets), None)


def _pack(start: Node) -> tuple[Node, ...]:
    """The nodes that compute a home buffer, in order; empty for a load."""
    return tuple(n for n in computed_from(start.all_input_nodes) if n.op != "placeholder")


def _nbytes(node: Node) -> int:
    """The bytes of a node's value; of a value whose size differs between nodes, the mean."""
    if META in node.meta and (mean := node.meta[META].mean_bytes) is not None:
        return int(mean)
    value = node.meta["val"]
    return int(value.numel()) * int(value.dtype.itemsize)
