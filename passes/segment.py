"""Fuse the compute between explicit nodes into submodules."""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols

from fcdp_compile.ops import EXPLICIT
from fcdp_compile.passes.context import META


def segment(gm: GraphModule) -> GraphModule:
    """Replace each run of compute nodes by a call of a submodule `segment_<i>`.

        wait, mm, gelu, mm, free, ...  ->  wait, segment_0, free, ...

    A segment takes what it needs from outside and returns a tuple of what is needed after it, so that it
    can be compiled on its own, and compiled once if another is equal to it.  What lines up a bucket's home
    shards is a segment of its own.

    Requires: `lower`.
    Leaves: placeholders, explicit nodes, calls of segments, getitems of their results, constants that are
    results themselves, the output.
    """
    _raise_getitems(gm.graph)
    for number, run in enumerate(_runs(gm.graph)):
        _extract(gm, run, f"segment_{number}")
    for node in gm.graph.find_nodes(op="get_attr"):
        if not node.users:
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()
    return gm


def _runs(graph: Graph) -> list[list[Node]]:
    runs: list[list[Node]] = [[]]
    mark = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target in EXPLICIT:
            runs.append([])
        elif node.op != "get_attr":
            # Lining up the shards of a later bucket is no part of this layer's compute: with it, the
            # segments of equal layers would differ where prefetching begins and ends.
            if node.meta.get(META) != mark:
                mark = node.meta.get(META)
                runs.append([])
            runs[-1].append(node)
    return [run for run in runs if run]


def _raise_getitems(graph: Graph) -> None:
    """Move each getitem behind the node it takes from: a compiled segment cannot return a tuple of one op."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is operator.getitem:
            source = node.args[0]
            if isinstance(source, Node) and source.op == "call_function":
                source.append(node)


def _extract(gm: GraphModule, run: list[Node], name: str) -> None:
    inside = set(run)
    inner = Graph()
    env: dict[Node, Node] = {}
    inputs: dict[Node, None] = {}
    taken = [a for node in run for a in node.all_input_nodes if a not in inside]
    for outer in [*_symbols(gm.graph, [*taken, *run]), *taken]:
        if outer.op != "get_attr":
            inputs[outer] = None
    for outer in inputs:
        env[outer] = inner.placeholder(outer.name)
        env[outer].meta = dict(outer.meta)

    def inner_of(node: Node) -> Node:
        if node not in env:  # a constant: a copy in every segment that reads it
            env[node] = inner.node_copy(node)
        return env[node]

    for node in run:
        env[node] = inner.node_copy(node, inner_of)
    results = [n for n in run if any(u not in inside for u in n.users)]
    inner.output(tuple(env[n] for n in results))
    gm.add_submodule(name, GraphModule(gm, inner, class_name=name))
    with gm.graph.inserting_after(run[-1]):
        call = gm.graph.call_module(name, tuple(inputs))
    _take_results(gm.graph, call, results, inside)
    for node in reversed(run):
        gm.graph.erase_node(node)


def _symbols(graph: Graph, nodes: list[Node]) -> list[Node]:
    """The graph's inputs that are the symbols in the sizes of `nodes`.

    A compiler cannot solve an input of size 2*s for s; a segment is told every symbol it reads.
    """
    needed = {s for n in nodes if "val" in n.meta for s in free_symbols(n.meta["val"])}
    return [
        node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(val := node.meta.get("val"), torch.SymInt)
        and val.node.expr.is_symbol
        and val.node.expr in needed
    ]


def _take_results(graph: Graph, call: Node, results: list[Node], inside: set[Node]) -> None:
    with graph.inserting_after(call):
        for index, node in reversed(list(enumerate(results))):
            taken = graph.call_function(operator.getitem, (call, index))
            taken.meta = dict(node.meta)
            node.replace_all_uses_with(taken, delete_user_cb=lambda user: user not in inside)
