"""Count the work of a segment: floating point operations, bytes read and written, and bytes sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from fcdp_compile.torch_compat import OpOverload, tree_leaves

_ATEN = torch.ops.aten
_SAME_WORK = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators whose work torch does not count, each with one that does the same on the same arguments."""

_OF_TORCH = frozenset({"aten", "prims", "inductor_prims", "rngprims", "_c10d_functional"})
"""Namespaces of operators that are no kernels of other libraries."""

Sizes = Mapping[sympy.Symbol, int]
"""Values of symbols that differ from the traced values."""


def flops_of(graph: Graph, sizes: Sizes) -> int:
    """Floating point operations of the matrix products, convolutions and attention of a graph."""
    return sum(_flops(n, sizes) for n in graph.nodes if isinstance(n.target, OpOverload))


def accessed_bytes_of(graph: Graph, sizes: Sizes) -> int:
    """Bytes of a segment's inputs and results: the least that its compute reads and writes."""
    results: Any = graph.output_node().args[0]
    nodes = [*graph.find_nodes(op="placeholder"), *results]
    return sum(_nbytes(n.meta.get("val"), sizes) for n in nodes if isinstance(n, Node))


def kernel_bytes_of(graph: Graph, sizes: Sizes) -> int:
    """Bytes that operators of other libraries read and write: nothing fuses their kernels with others.

    A library's kernel that dequantises a weight reads the packed weight and writes a whole one.
    """
    found = 0
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace not in _OF_TORCH:
            results = tree_leaves(node.meta.get("val"))
            values = [*(n.meta.get("val") for n in node.all_input_nodes), *results]
            found += sum(_nbytes(v, sizes) for v in values)
    return found


def inner_bytes_of(graph: Graph, sizes: Sizes, ranks: Mapping[str, int]) -> int:
    """Bytes that this rank sends in collectives of the model itself: context, tensor or expert parallelism.

    ranks: how many each group has, by its name; other groups count as large ones.
    """
    found = 0
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "_c10d_functional":
            kind = node.target.overloadpacket.__name__
            rounds = _ROUNDS.get(kind, 0)
            group = next((a for a in reversed(node.args) if isinstance(a, str)), "")
            sent = sum(_nbytes(n.meta.get("val"), sizes) for n in node.all_input_nodes)
            size = ranks.get(group)
            if kind == "all_gather_into_tensor":
                found += sent * ((size or int(node.args[1])) - 1)
            else:
                found += rounds * (sent if size is None else sent * (size - 1) // size)
    return found


_ROUNDS = {"all_reduce": 2, "all_reduce_": 2, "reduce_scatter_tensor": 1, "all_to_all_single": 1}
"""How often a large group's rank sends its input, by collective; an all-gather's sends it to each rank."""


def _flops(node: Node, sizes: Sizes) -> int:
    assert isinstance(node.target, OpOverload)
    packet = node.target.overloadpacket
    formula: Any = flop_registry.get(_SAME_WORK.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return _known(formula(*args, **kwargs, out_val=node.meta.get("val")), sizes)


def _nbytes(value: object, sizes: Sizes) -> int:
    if not isinstance(value, Tensor):
        return 0
    return _known(value.numel(), sizes) * value.dtype.itemsize


def _known(size: int | SymInt, sizes: Sizes) -> int:
    """A size as a number; its traced value if `sizes` lacks one of its symbols, 0 if it depends on data."""
    if isinstance(size, int):
        return size
    known = sympy.sympify(size.node.expr.xreplace(sizes))
    return int(known) if known.is_number else int(size.node.hint or 0)
