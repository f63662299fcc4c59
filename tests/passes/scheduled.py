"""Graphs before and after `schedule`, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule, Node

from builders_graph import Where, lower_toy
from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META, Packing, PassContext
from fcdp_compile.passes.schedule import schedule
from fcdp_compile.plan import Direction, Variant

SPREADS = (ops.intra_all_gather, ops.intra_rest_all_gather)
GATHERS = (
    ops.load,
    ops.inter_all_gather,
    ops.intra_own_all_gather,
    *SPREADS,
)
REDUCTIONS = (ops.collect, ops.accumulate, ops.intra_reduce_scatter, ops.inter_reduce_scatter)
BOOKKEEPING = (ops.stamp, ops.check)

GENEROUS = 1 << 60

FORWARD = (Direction.FORWARD, Variant.COLD)
BACKWARD = (Direction.BACKWARD, Variant.COLD)

FOUR = {f"w{i}": (4, 4) for i in range(4)}
W = 4 * 4 * 4  # bytes of each
WHERE = Where()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A graph before and after: the same nodes, but for waits that were added."""

    gm: GraphModule
    ctx: PassContext
    before: list[Node]
    inputs: dict[Node, list[Node]]

    @property
    def after(self) -> list[Node]:
        return list(self.gm.graph.nodes)


def scheduled(gm: GraphModule, ctx: PassContext) -> Scheduled:
    before = list(gm.graph.nodes)
    inputs = {n: list(n.all_input_nodes) for n in before}
    return Scheduled(gm=schedule(gm, ctx), ctx=ctx, before=before, inputs=inputs)


def is_compute(node: Node) -> bool:
    return (
        node.op == "call_function"
        and node.target not in ops.EXPLICIT
        and not isinstance(node.meta.get(META), Packing)
    )


def four(
    key: tuple[Direction, Variant] = FORWARD, *, budget: int | None = None, strategy: str = "zero3"
) -> Scheduled:
    """Four equal parameters in buckets of their own, used once each."""
    made = lower_toy(FOUR, WHERE, strategy=strategy, bucket_bytes=1)
    return scheduled(made.graphs[key], replace(made.contexts[key], in_flight_bytes=budget))


def users(node: Node, *targets: Callable[..., Any]) -> list[Node]:
    return [u for u in node.users if u.target in targets]


def last_wait(start: Node) -> Node:
    """The wait for a started step: its own, or the wait of the step that continues it."""
    onward = users(start, *GATHERS, *REDUCTIONS)
    if onward:
        return last_wait(onward[0])
    (wait,) = users(start, ops.wait)
    return wait
