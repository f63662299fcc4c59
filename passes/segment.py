"""Fuse the compute between explicit nodes into submodules, such that layers become equal segments."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from itertools import accumulate, pairwise

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.fx.node import map_arg

from fcdp_compile.ops import EXPLICIT
from fcdp_compile.passes.graph.context import META, PassContext
from fcdp_compile.passes.graph.repetition import Repetition, stretches
from fcdp_compile.passes.graph.views import is_view
from fcdp_compile.torch_compat.graphs import graph_module


def segment(gm: GraphModule, ctx: PassContext | None = None) -> GraphModule:
    """Replace each run of compute nodes by a call of a submodule `segment_<i>`.

        wait, mm, gelu, mm, free, ...  ->  wait, segment_0, free, ...

    A run of several layers is cut between the layers (`cut_layers`); a run without layers is one segment.
    A segment's inputs are the outside values that it reads; it returns a tuple of the values that are used
    after it.  So a segment can be compiled alone, and equal segments are compiled once.  The nodes that pack
    a bucket's home shards are a segment of their own.

    ctx: not read; every pass takes one.

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
            # Packing the shards of a later bucket is not in this layer's segment: otherwise the segments
            # of equal layers would differ where prefetching begins and ends.
            if node.meta.get(META) != mark:
                mark = node.meta.get(META)
                runs.append([])
            runs[-1].append(node)
    return [run for run in runs if run]


def _raise_parts(graph: Graph) -> None:
    """Move getitems, returned views and scalars right behind the value that they are taken from.

    A compiled segment cannot return the tuple of an op, so the op's getitems must be with it.  A graph ends
    with the views that all layers return for the backward; moved, a view belongs to its layer.  A scalar out
    of a tensor, such as the seed of one dropout out of all seeds, has a number that would make a layer differ
    from the next; taken outside of the layer, the scalar is an input like any other.
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
    """The inputs for the symbols in the sizes of `nodes`.

    A segment is given every symbol it reads: a compiler cannot solve an input of size 2*s for s.
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


_MIN_NODES = 16
"""The fewest nodes of a segment cut out of a run: its call takes about 10 us on the Python thread."""

_MIN_SEGMENTS = 3
"""Fewer equal segments save no compiling: the nodes before and after them are compiled, too."""


def cut_layers(run: Sequence[Node]) -> list[list[Node]]:
    """Cut a run of compute nodes at the same place in each of the layers it holds.

        embedding n a m n a m n a m n a m head   ->   embedding n | a m n | a m n | a m n | a m head

    A layer is a part that repeats in the sequence of nodes, with equal ops, constants and shapes of results.
    The cut is where the fewest values cross it, at the residual stream: a value that crosses is written to
    memory and read again.

    Requires: nodes in an order that can run.
    Returns the pieces; joined in order they are the run.
    """
    if len(run) < _MIN_SEGMENTS * _MIN_NODES:
        return [list(run)] if run else []
    borders = {0, len(run)}
    crossing = _crossing(run)
    for stretch in stretches([_kind(n) for n in run]):
        # One op many times is not a layer.
        if isinstance(stretch, Repetition) and stretch.period > 1:
            borders.update(_borders(stretch, crossing))
    return [list(run[a:b]) for a, b in pairwise(sorted(borders))]


def _borders(repeated: Repetition, crossing: list[int]) -> list[int]:
    together = -(-_MIN_NODES // repeated.period)
    length = repeated.period * together
    first = min(
        range(repeated.start, repeated.start + repeated.period),
        key=lambda b: (sum(crossing[b : repeated.stop : length]), b),
    )
    borders = list(range(first, repeated.stop + 1, length))
    return borders if len(borders) > _MIN_SEGMENTS else []


def _crossing(run: Sequence[Node]) -> list[int]:
    """For each border, how many values cross it; values that are also used outside of the run don't count."""
    place = {node: i for i, node in enumerate(run)}
    changes = [0] * (len(run) + 1)
    for i, node in enumerate(run):
        uses = [place.get(user, len(run)) for user in node.users]
        last = max(uses, default=i)
        if i < last < len(run):
            changes[i + 1] += 1
            changes[last + 1] -= 1
    return list(accumulate(changes))


def _kind(node: Node) -> Hashable:
    constants = map_arg((node.args, node.kwargs), lambda n: None)
    return node.target, str(constants), _described(node.meta.get("val"))


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.stride()}"
    return type(value).__name__
