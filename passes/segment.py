"""Fuse the compute between explicit nodes into submodules."""

from __future__ import annotations

import operator

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols

from fcdp_compile.ops import EXPLICIT
from fcdp_compile.passes.graph.context import META, PassContext
from fcdp_compile.passes.graph.layers import cut_layers
from fcdp_compile.passes.graph.views import is_view
from fcdp_compile.torch_compat import graph_module


def segment(gm: GraphModule, ctx: PassContext | None = None) -> GraphModule:
    """Replace each run of compute nodes by a call of a submodule `segment_<i>`.

        wait, mm, gelu, mm, free, ...  ->  wait, segment_0, free, ...

    A run that holds several layers is cut between them (`cut_layers`), a run without layers is one segment.
    A segment takes what it needs from outside and returns a tuple of what is needed after it, so that it
    can be compiled on its own, and compiled once if another is equal to it.  What lines up a bucket's home
    shards is a segment of its own.

    ctx: as every pass is given one; nothing of it is read.

    Requires: `lower`.
    Leaves: placeholders, explicit nodes, calls of segments, getitems of their results, constants that are
    results themselves, the output.
    """
    _raise_parts(gm.graph)
    pieces = [piece for run in _runs(gm.graph) for piece in cut_layers(run) if piece]
    symbols = _symbols(gm.graph)
    for number, piece in enumerate(pieces):
        _extract(gm, piece, f"segment_{number}", symbols)
    for node in gm.graph.find_nodes(op="get_attr"):
        if not node.users:
            gm.graph.erase_node(node)
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


def _raise_parts(graph: Graph) -> None:
    """Move what only takes a part or a view of a value behind that value, where it belongs to a layer.

    A compiled segment cannot return a tuple of one op, so that getitems belong to the op.  Views for the
    backward stand at the end of a graph, those of all layers together.  A scalar out of a tensor, such as the
    seed of one dropout out of those of all, would make a layer differ from the next by its number; taken
    outside it is an input like any other.
    """
    output = graph.output_node()
    body = next(n for n in graph.nodes if n.op != "placeholder")
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            continue
        source = node.args[0]
        is_scalar = node.target is torch.ops.aten.select.int and node.meta["val"].ndim == 0
        is_returned_view = is_view(node) and all(u is output for u in node.users)
        if source.op == "call_function":
            if node.target is operator.getitem or is_scalar or is_returned_view:
                source.append(node)
        elif source.op == "placeholder" and is_scalar and node is not body:
            body.prepend(node)


def _extract(
    gm: GraphModule, run: list[Node], name: str, symbols: dict[sympy.Symbol, Node]
) -> None:
    inside = set(run)
    inner = Graph()
    env: dict[Node, Node] = {}
    inputs: dict[Node, None] = {}
    taken = [a for node in run for a in node.all_input_nodes if a not in inside]
    for outer in [*_symbols_of([*taken, *run], symbols), *taken]:
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
    gm.add_submodule(name, graph_module(gm, inner, name))
    with gm.graph.inserting_after(run[-1]):
        call = gm.graph.call_module(name, tuple(inputs))
    _take_results(gm.graph, call, results, inside)
    for node in reversed(run):
        gm.graph.erase_node(node)


def _symbols(graph: Graph) -> dict[sympy.Symbol, Node]:
    """The graph's inputs that are symbols."""
    return {
        val.node.expr: node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(val := node.meta.get("val"), torch.SymInt) and val.node.expr.is_symbol
    }


def _symbols_of(nodes: list[Node], symbols: dict[sympy.Symbol, Node]) -> list[Node]:
    """The inputs that are the symbols in the sizes of `nodes`.

    A compiler cannot solve an input of size 2*s for s; a segment is told every symbol it reads.
    """
    if not symbols:
        return []
    needed = {s for n in nodes if "val" in n.meta for s in free_symbols(n.meta["val"])}
    return [node for symbol, node in symbols.items() if symbol in needed]


def _take_results(graph: Graph, call: Node, results: list[Node], inside: set[Node]) -> None:
    with graph.inserting_after(call):
        for index, node in reversed(list(enumerate(results))):
            taken = graph.call_function(operator.getitem, (call, index))
            taken.meta = dict(node.meta)
            node.replace_all_uses_with(taken, delete_user_cb=lambda user: user not in inside)
