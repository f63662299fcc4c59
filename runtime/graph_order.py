"""What the order of a lowered graph's nodes tells a program before it runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from fcdp_compile import ops
from fcdp_compile.plan.whole_step import drain_begins


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
    """The last nodes before the output that belong to the drain (`runtime.drains`)."""
    place = {node: at for at, node in enumerate(nodes)}
    steps = nodes[:-1]
    inputs = [[place[i] for i in node.all_input_nodes] for node in steps]
    return list(steps[drain_begins([ops.kind_of(node) for node in steps], inputs) :])
