"""Make the schedule of a finished graph."""

from __future__ import annotations

import operator
from dataclasses import replace

from torch.fx import GraphModule, Node

from fcdp_compile.passes.graph.context import META, PassContext, StepMeta
from fcdp_compile.passes.graph.work import (
    accessed_bytes_of,
    flops_of,
    inner_bytes_of,
    kernel_bytes_of,
)
from fcdp_compile.passes.schedule import in_flight_bytes
from fcdp_compile.plan import Kind, Schedule, Step


def describe(gm: GraphModule, ctx: PassContext) -> Schedule:
    """The steps of a graph, one for each explicit node and each segment, in the order they run.

    Requires: `segment`.
    """
    numbered: dict[Node, int] = {}
    steps: list[Step] = []
    for node in gm.graph.nodes:
        step = _step_of(node, gm, ctx)
        if step is None:
            continue
        waits = sorted({numbered[p] for p in _producers(node) if p in numbered})
        numbered[node] = len(steps)
        steps.append(replace(step, index=len(steps), waits=tuple(waits)))
    return Schedule(
        direction=ctx.direction,
        variant=ctx.variant,
        steps=tuple(steps),
        in_flight_bytes=in_flight_bytes(gm),
    )


def is_step(node: Node) -> bool:
    """Whether a node of a finished graph is a step of its schedule."""
    is_explicit = isinstance(node.meta.get(META), StepMeta) and node.target is not operator.getitem
    return is_explicit or node.op == "call_module"


def _step_of(node: Node, gm: GraphModule, ctx: PassContext) -> Step | None:
    if not is_step(node):
        return None
    if node.op != "call_module":
        step: Step = node.meta[META].step
        return step
    inner = gm.get_submodule(str(node.target))
    assert isinstance(inner, GraphModule), f"{node.target} is not a segment"
    count = len([n for n in inner.graph.nodes if n.op == "call_function"])
    return Step(
        index=0,
        kind=Kind.COMPUTE,
        lane=Kind.COMPUTE.lane,
        bucket=None,
        bytes=0,
        waits=(),
        flops=flops_of(inner.graph, ctx.sizes),
        accessed_bytes=accessed_bytes_of(inner.graph, ctx.sizes),
        kernel_bytes=kernel_bytes_of(inner.graph, ctx.sizes),
        inner_bytes=inner_bytes_of(inner.graph, ctx.sizes, ctx.inner_ranks),
        label=f"{node.target} ({count} ops)",
    )


def _producers(node: Node) -> list[Node]:
    """The nodes that compute the arguments of an explicit node or segment; getitems are skipped."""
    producers = []
    for source in node.all_input_nodes:
        while source.target is operator.getitem:
            (source,) = source.all_input_nodes
        producers.append(source)
    return producers
