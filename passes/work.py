"""How much work a segment is: floating point operations, and bytes read and written."""

from __future__ import annotations

from typing import Any

from torch import SymInt, Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from fcdp_compile.torch_compat import OpOverload


def flops_of(graph: Graph) -> int:
    """Floating point operations of the matrix products, convolutions and attention of a graph."""
    return sum(_flops(n) for n in graph.nodes if isinstance(n.target, OpOverload))


def accessed_bytes_of(graph: Graph) -> int:
    """Bytes of a segment's inputs and results: the least that its compute reads and writes."""
    results: Any = graph.output_node().args[0]
    nodes = [*graph.find_nodes(op="placeholder"), *results]
    return sum(_nbytes(n.meta.get("val")) for n in nodes if isinstance(n, Node))


def _flops(node: Node) -> int:
    assert isinstance(node.target, OpOverload)
    formula: Any = flop_registry.get(node.target.overloadpacket)
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return _known(formula(*args, **kwargs, out_val=node.meta.get("val")))


def _nbytes(value: object) -> int:
    if not isinstance(value, Tensor):
        return 0
    return _known(value.numel()) * value.dtype.itemsize


def _known(size: int | SymInt) -> int:
    """A size, or what a symbolic one was when it was traced; nothing for one that depends on values."""
    return size if isinstance(size, int) else int(size.node.hint or 0)
