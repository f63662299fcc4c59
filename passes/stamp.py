"""Tell a backward which generation of each bucket its forward used, and whether to accumulate gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fcdp_compile import ops
from fcdp_compile.ops import REDUCE_GRAD
from fcdp_compile.passes.graph.inline import fake_mode
from fcdp_compile.torch_compat.graphs import is_opaque, saved_output_descriptor


def stamp(
    fw: GraphModule, bw: GraphModule, buckets: Sequence[int], *, num_fwd_outputs: int
) -> None:
    """Save one more tensor: which generations a backward must use, and whether it accumulates gradients.

        forward:  stamps = stamp(buckets), first of all, returned among the saved tensors
        backward: check(stamps, buckets), first of all

    buckets: the numbers of those that the backward uses.

    Requires: `partition`, and `bucket` for both graphs.
    Leaves: a `stamp` and a `check`; both graphs unchanged if the backward gathers and reduces nothing.
    """
    if not buckets and not bw.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        return
    output = fw.graph.output_node()
    results: Any = output.args[0]
    outputs: list[Node] = list(results)
    saved = outputs[num_fwd_outputs:]
    tensors = [n for n in saved if isinstance(n.meta["val"], Tensor)]
    symbols = [n for n in saved if n not in tensors and not is_opaque(n)]
    inputs = fw.graph.find_nodes(op="placeholder")
    with fw.graph.inserting_after(inputs[-1]) if inputs else fw.graph.inserting_before(output):
        node = fw.graph.call_function(ops.stamp, (tuple(buckets),))
    with fake_mode(fw):
        node.meta["val"] = torch.zeros(3 + len(buckets), dtype=torch.int64, device="cpu")
    at = num_fwd_outputs + len(tensors)
    output.args = ((*outputs[:at], node, *outputs[at:]),)
    if (descriptions := output.meta.get("desc")) is not None:
        output.meta["desc"] = [*descriptions, saved_output_descriptor(len(saved))]
    placeholders = bw.graph.find_nodes(op="placeholder")
    before = placeholders[len(symbols) + len(tensors)]
    with bw.graph.inserting_before(before):
        stamps = bw.graph.placeholder("stamps")
    stamps.meta["val"] = node.meta["val"]
    with bw.graph.inserting_before(placeholders[-1].next):
        bw.graph.call_function(ops.check, (stamps, tuple(buckets)))
    for gm in (fw, bw):
        gm.recompile()
