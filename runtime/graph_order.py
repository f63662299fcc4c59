"""What the order of a lowered graph's nodes tells a program before it runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from fcdp_compile import ops
from fcdp_compile.plan import Kind
from fcdp_compile.plan.reduction import REDUCING

_REDUCED = (*REDUCING, Kind.COLLECT)
_ENDING = (Kind.WAIT, Kind.FREE, Kind.COMPUTE, None)


def last_uses(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """For each node, the nodes whose values nobody needs after it; outputs are needed for ever."""
    dying: dict[Node, list[Node]] = {}
    seen: set[Node] = set(nodes[-1].all_input_nodes)
    for node in reversed(nodes[:-1]):
        for used in [*node.all_input_nodes, node]:
            if used not in seen:
                seen.add(used)
                dying.setdefault(node, []).append(used)
    return dying


def drain(nodes: Sequence[Node]) -> list[Node]:
    """The last nodes before the output that do nothing but wait for reductions and compute from these.

    See `runtime.drains`.
    """
    late: set[Node] = set()
    for node in nodes[:-1]:
        if _waits_for_reduction(node) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
    first = len(nodes) - 1
    while nodes[first - 1] in late and ops.kind_of(nodes[first - 1]) in _ENDING:
        first -= 1
    return list(nodes[first:-1])


def _waits_for_reduction(node: Node) -> bool:
    return node.target is ops.wait and ops.kind_of(node.all_input_nodes[0]) in _REDUCED
