"""Cut the joint graph into forward and backward such that no gathered parameter is saved."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.graph.views import changes_nothing, computed_from, same_values
from fcdp_compile.torch_compat import CheckpointPolicy, detect_fake_mode
from fcdp_compile.torch_compat.graphs import graph_module, is_opaque, saved_output_descriptor

Partitioner = Callable[..., tuple[GraphModule, GraphModule]]

_CONSTANT = "fcdp_constant"
"""The mark of an input in its `meta`, which torch's partitioner copies."""

_RECOMPUTE_FIRST = 1 << 30
"""An `ac_graph_id` above those of all checkpointed regions: torch saves a recomputed node if a region with
a larger number uses it."""


def partition(
    joint: GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    partitioner: Partitioner,
    **options: Any,
) -> tuple[GraphModule, GraphModule]:
    """Partition with torch's `partitioner`, then save shards instead of values made of parameters alone.

        forward: unshard(w) -> t -> mm ... saves t(w) [P]       saves w's shard [P/G]
        backward:           t(w) -> mm                     =>   unshard(shard) -> t -> mm

    The partitioner's tags alone do not achieve this under activation checkpointing, where a region's tag
    wins.  With opaque inputs (DTensor's meshes) torch 2.13 puts saved RNG states behind them, where
    AOTAutograd does not look.  This pass repairs both.

    Requires: a joint graph of `unshard` and `reduce_grad` ops, whose constant inputs have their mark.
    Leaves: no saved value is a gathered parameter or is computed from parameters and constants; an input
    is saved itself, not as a view that changes nothing (`to_local`'s); one `reduce_grad` for a sum of
    gradients of one key; a `val` on every recomputed random op.
    """
    _merge_reductions(joint.graph)
    if not _has_backward(joint.graph, num_fwd_outputs):
        return partitioner(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
    _prefer_recomputing(joint.graph)
    halves = partitioner(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)
    # The partitioner's backward would generate its code again at each `recompile`.
    fw, bw = (graph_module(gm, gm.graph) for gm in halves)
    for gm in (fw, bw):
        _describe_random(gm.graph)
    _order_saved(fw.graph, bw.graph, num_fwd_outputs)
    _save_shards(fw.graph, bw.graph, num_fwd_outputs)
    _save_inputs(fw.graph, num_fwd_outputs)
    for gm in (fw, bw):
        gm.recompile()
    check_saved(fw, num_fwd_outputs)
    return fw, bw


def check_saved(fw: GraphModule, num_fwd_outputs: int) -> None:
    """Assert the invariant: no saved value is made of parameters alone."""
    derived = _made_of_parameters(fw.graph)
    kept = [n for n in _outputs(fw.graph)[num_fwd_outputs:] if n in derived]
    if kept:
        raise AssertionError(f"gathered parameters are saved for backward: {kept}")


def _outputs(graph: Graph) -> list[Any]:
    outputs: Any = graph.output_node().args[0]
    return list(outputs)


def _has_backward(graph: Graph, num_fwd_outputs: int) -> bool:
    return any(isinstance(o, Node) and not is_opaque(o) for o in _outputs(graph)[num_fwd_outputs:])


def _merge_reductions(graph: Graph) -> None:
    """reduce(a) + reduce(b) of one parameter becomes reduce(a + b): a tied weight is reduced once."""
    for add in graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
        if len(add.args) != 2 or add.kwargs or not all(isinstance(a, Node) for a in add.args):
            continue
        left, right = (_reduction_behind(a) for a in add.args)
        if left is None or right is None or left is right or left.args[1] != right.args[1]:
            continue
        with graph.inserting_before(add):
            total = graph.call_function(torch.ops.aten.add.Tensor, (left.args[0], right.args[0]))
            summands = [reduction.all_input_nodes[0].meta["val"] for reduction in (left, right)]
            total.meta = {**left.all_input_nodes[0].meta, "val": torch.add(*summands)}
            reduced = graph.call_function(REDUCE_GRAD, (total, left.args[1]))
            reduced.meta = dict(left.meta)
        add.replace_all_uses_with(reduced)
        for end in (add, *add.all_input_nodes):
            _erase_chain(end)


def _reduction_behind(node: Node) -> Node | None:
    """The `reduce_grad` behind views that change nothing (`to_local`'s), if each view has one user."""
    while len(node.users) == 1:
        if node.target is REDUCE_GRAD:
            return node
        if not changes_nothing(node):
            return None
        node = node.all_input_nodes[0]
    return None


def _erase_chain(node: Node) -> None:
    while not node.users and node.op == "call_function":
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        if len(inputs) != 1:
            return
        (node,) = inputs


def mark_constant(placeholders: Iterable[Node]) -> None:
    """Mark inputs whose values are the same in the forward and its backward, such as scales in buffers."""
    for node in placeholders:
        node.meta[_CONSTANT] = True


def _made_of_parameters(graph: Graph) -> dict[Node, None]:
    """The values that are computed only from gathered parameters and constants."""
    derived: dict[Node, None] = {}
    constant: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or node.meta.get(_CONSTANT):
            constant.add(node)
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        if node.target is UNSHARD:
            derived[node] = None
        elif _is_random(node) or not all(i in derived or i in constant for i in inputs):
            continue
        elif any(i in derived for i in inputs):
            derived[node] = None
        else:
            constant.add(node)
    return derived


def _is_random(node: Node) -> bool:
    """Whether a node draws random numbers, itself or through an op among its arguments."""
    ops = (node.target, *node.args)
    return any(torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()) for op in ops)


def _describe_random(graph: Graph) -> None:
    """Give recomputed random ops a `val`, which the partitioner leaves out.

        bernoulli(x)  ->  graphsafe_run_with_rng_state(bernoulli, x, rng_state=…) without a `val`

    An op that returns a tuple needs none: the parts of the tuple have theirs.
    """
    mode = detect_fake_mode([n.meta.get("val") for n in graph.nodes])
    for node in [n for n in graph.nodes if "val" not in n.meta and _is_random(n)]:
        if mode is None or all(user.target is operator.getitem for user in node.users):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with mode:
            node.meta["val"] = node.target(*args, **kwargs)


def _prefer_recomputing(graph: Graph) -> None:
    """Tell the partitioner to recompute gathered parameters in the backward."""
    for node in _made_of_parameters(graph):
        if "recompute" not in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = _RECOMPUTE_FIRST


def _order_saved(fw: Graph, bw: Graph, num_fwd_outputs: int) -> None:
    """Order saved values as AOTAutograd reads them.

    Forward outputs: tensors, opaque, symbols; backward inputs: symbols, tensors, opaque.
    """
    outputs = _outputs(fw)
    saved = outputs[num_fwd_outputs:]
    inputs = bw.find_nodes(op="placeholder")
    _set_outputs(fw, outputs[:num_fwd_outputs] + _as_outputs(saved))
    after = inputs[len(saved)] if len(inputs) > len(saved) else None
    for node in _as_inputs(inputs[: len(saved)]):
        if after is not None:
            after.prepend(node)


def _as_outputs(saved: list[Node]) -> list[Node]:
    """Saved values in the order of a forward's outputs: tensors, opaque, symbols."""
    return sorted(saved, key=_rank)


def _as_inputs(saved: list[Node]) -> list[Node]:
    """Saved values in the order of a backward's inputs: symbols, tensors, opaque."""
    return sorted(saved, key=lambda n: (_rank(n) + 1) % 3)


def _rank(node: Node) -> int:
    return 1 if is_opaque(node) else 0 if isinstance(node.meta["val"], Tensor) else 2


def _set_outputs(graph: Graph, outputs: list[Any]) -> None:
    output = graph.output_node()
    descriptions = output.meta.get("desc")
    output.args = (tuple(outputs),)
    if descriptions is not None and len(descriptions) < len(outputs):
        added = range(len(descriptions), len(outputs))
        output.meta["desc"] = [*descriptions, *(saved_output_descriptor(i) for i in added)]


def _save_shards(fw: Graph, bw: Graph, num_fwd_outputs: int) -> None:
    """Let the forward save shards, not values made of parameters; the backward makes these values again.

    saved: cast(unshard(w)), x   ->   saved: w's shard, x;   backward: cast(unshard(shard)), before its use
    """
    derived = _made_of_parameters(fw)
    outputs = _outputs(fw)
    saved = outputs[num_fwd_outputs:]
    inputs = _saved_inputs(bw, saved)
    rebuilt = {n: inputs.pop(n) for n in list(saved) if n in derived}
    if not rebuilt:
        return
    added = _add_inputs(bw, rebuilt, inputs)
    for node, placeholder in rebuilt.items():
        # Each value gets its own copies of the nodes that compute it, right before its first user.  `lower`
        # later merges the copies of one `unshard`.
        env = dict(inputs)
        with bw.inserting_before(min(placeholder.users)):
            for needed in computed_from([node]):
                if needed not in env:
                    env[needed] = _copy(bw, needed, env)
        placeholder.replace_all_uses_with(env[node])
        bw.erase_node(placeholder)
    kept = [n for n in saved if n not in rebuilt]
    _set_saved(fw, bw, outputs[:num_fwd_outputs], _as_outputs([*kept, *added]), inputs)


def _save_inputs(fw: Graph, num_fwd_outputs: int) -> None:
    """Save inputs instead of views that change nothing, which the graph would make for nothing else."""
    outputs = _outputs(fw)
    saved = outputs[num_fwd_outputs:]
    _set_outputs(fw, outputs[:num_fwd_outputs] + [_input_behind(n) for n in saved])
    for node in dict.fromkeys(saved):
        _erase_chain(node)


def _input_behind(saved: Node) -> Node:
    node = same_values(saved)
    return node if node.op == "placeholder" else saved


def _add_inputs(bw: Graph, rebuilt: dict[Node, Node], inputs: dict[Node, Node]) -> list[Node]:
    """Give the backward an input for each shard that it lacks; return the forward's nodes of these shards."""
    added: list[Node] = []
    first = next(iter(rebuilt.values()))
    for node in rebuilt:
        for needed in computed_from([node]):
            if needed.op == "placeholder" and needed not in inputs:
                with bw.inserting_before(first):
                    inputs[needed] = bw.placeholder(needed.name)
                inputs[needed].meta = dict(needed.meta)
                added.append(needed)
    return added


def _copy(bw: Graph, node: Node, env: dict[Node, Node]) -> Node:
    if node.op == "get_attr":
        name = str(node.target)
        setattr(bw.owning_module, name, getattr(node.graph.owning_module, name))
    return bw.node_copy(node, env.__getitem__)


def _saved_inputs(bw: Graph, saved: list[Node]) -> dict[Node, Node]:
    """The backward's input for each saved value; the backward has its symbols first."""
    placeholders = bw.find_nodes(op="placeholder")[: len(saved)]
    return dict(zip(_as_inputs(saved), placeholders, strict=True))


def _set_saved(
    fw: Graph, bw: Graph, results: list[Any], saved: list[Node], inputs: dict[Node, Node]
) -> None:
    _set_outputs(fw, results + saved)
    start = next(iter(bw.nodes))
    for node in reversed(_as_inputs(saved)):
        if inputs[node] is not start:
            start.prepend(inputs[node])
            start = inputs[node]
