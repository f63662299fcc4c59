"""Insert explicit nodes into a graph, each with its step; not a pass, a tool of the passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META, StepMeta
from fcdp_compile.plan import Bucket, Kind, Step


def explicit(
    graph: Graph,
    op: Callable[..., Any],
    args: Sequence[Node],
    bucket: Bucket,
    sent_bytes: int,
    val: Tensor | None = None,
    *,
    accessed_bytes: int = 0,
    scratch_bytes: int = 0,
    mean_bytes: int | None = None,
) -> Node:
    """Insert an explicit node; `val` is its result, which takes device memory from here on.

    accessed_bytes: bytes that it also reads and writes to put parts in order.  scratch_bytes: device memory
    that it also takes while it runs.  mean_bytes: as in `StepMeta`.
    """
    node = graph.call_function(op, tuple(args), {"bucket": bucket.id})
    kind = ops.EXPLICIT[op]
    assert kind is not None
    step = Step(
        index=0,
        kind=kind,
        lane=kind.lane,
        bucket=bucket.id,
        bytes=sent_bytes,
        waits=(),
        accessed_bytes=accessed_bytes,
    )
    node.meta[META] = StepMeta(step=step, scratch_bytes=scratch_bytes, mean_bytes=mean_bytes)
    if val is not None:
        node.meta["val"] = val
    return node


def wait_for(graph: Graph, pending: Node) -> Node:
    """Insert a wait for a started step; the value of the wait is the step's result."""
    meta = pending.meta[META]
    node = graph.call_function(ops.wait, (pending,), {"bucket": meta.step.bucket})
    node.meta[META] = StepMeta(
        step=Step(
            index=0,
            kind=Kind.WAIT,
            lane=Kind.WAIT.lane,
            bucket=meta.step.bucket,
            bytes=0,
            waits=(),
            label=meta.step.kind.value,
        )
    )
    if "val" in pending.meta:
        node.meta["val"] = pending.meta["val"]
    return node


def erase_unused(nodes: list[Node]) -> None:
    """Erase unused nodes, and then their inputs if nothing else uses them; explicit nodes stay."""
    for node in nodes:
        if not node.users and node.op == "call_function" and node.target not in ops.EXPLICIT:
            inputs = node.all_input_nodes
            node.graph.erase_node(node)
            erase_unused(inputs)
