"""How much work a segment is: floating point operations, and bytes read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from fcdp_compile.torch_compat import OpOverload

_ATEN = torch.ops.aten
_SAME_WORK = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        _ATEN._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators that torch counts no operations of, and others that do the same work on the same arguments."""

Sizes = Mapping[sympy.Symbol, int]
"""Values of symbols, where they are not those that they were traced with."""


def flops_of(graph: Graph, sizes: Sizes) -> int:
    """Floating point operations of the matrix products, convolutions and attention of a graph."""
    return sum(_flops(n, sizes) for n in graph.nodes if isinstance(n.target, OpOverload))


def accessed_bytes_of(graph: Graph, sizes: Sizes) -> int:
    """Bytes of a segment's inputs and results: the least that its compute reads and writes."""
    results: Any = graph.output_node().args[0]
    nodes = [*graph.find_nodes(op="placeholder"), *results]
    return sum(_nbytes(n.meta.get("val"), sizes) for n in nodes if isinstance(n, Node))


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
    """A size, or what a symbolic one was when it was traced; nothing for one that depends on values."""
    if isinstance(size, int):
        return size
    known = sympy.sympify(size.node.expr.xreplace(sizes))
    return int(known) if known.is_number else int(size.node.hint or 0)
