"""Keep values that are not the model's own out of buckets and caches."""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph, GraphModule, Node

from fcdp_compile.ops import GIVEN, REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.graph.views import same_values


def set_apart(gm: GraphModule, *, every: bool = False) -> GraphModule:
    """Gather a parameter by itself if the graph reads it with values that are not the model's own.

        functional_call(model, {"w": 0.5 * w}, x)     unshard(mul(w, 0.5))  ->  unshard_given(mul(w, 0.5))
        model(x) + functional_call(model, ema, x)     unshard(w), unshard(e), both with the key of w
                                                      ->  unshard_given(w), unshard_given(e)

    A bucket is filled from the model's home shards, so only reads of home shards may use it.  Whether an
    input of the graph is a home shard is known when the graph runs (`runtime.run`); this pass finds the keys
    that are not read from one single input.  The gradients of such a key are reduced one by one, too:
    accumulated gradients belong to the parameter, not to a value in its place.

    every: set all keys apart and move each gather before its first use.  The result runs when a graph is
    given values that are not the model's own.

    Requires: nothing.
    Leaves: every `unshard` reads an input of the graph, and equal keys read the same input.
    """
    shards = shard_inputs(gm.graph)
    keys = {key for key, source in shards.items() if every or source is None}
    if keys:
        _retarget(gm.graph, keys)
        if every:
            for node in gm.graph.find_nodes(op="call_function", target=GIVEN[UNSHARD]):
                if node.users:
                    min(node.users).prepend(node)
        gm.recompile()
    return gm


def shard_inputs(graph: Graph) -> dict[str, Node | None]:
    """The input that each key of a graph is read from; None for a computed value or several inputs."""
    found: dict[str, Node | None] = {}
    for node in graph.find_nodes(op="call_function", target=UNSHARD):
        key, source = str(node.args[1]), same_values(node.all_input_nodes[0])
        is_input = source.op == "placeholder" and found.get(key, source) is source
        found[key] = source if is_input else None
    return found


def _retarget(graph: Graph, keys: Collection[str]) -> None:
    for target in (UNSHARD, REDUCE_GRAD):
        for node in graph.find_nodes(op="call_function", target=target):
            if node.args[1] in keys:
                node.target = GIVEN[target]
