"""Refuse graphs that write to a gathered parameter, because the write would be lost.

In a forward a parameter's attribute is a temporary, gathered copy.  `self.weight.data.clamp_(0)` would write
to this copy and never to the home shard, without an error; outside of a forward the same line works.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from fcdp_compile.core.params.registry import lost_write
from fcdp_compile.ops import UNSHARD

_WRITING_OPERATORS = {
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.setitem,
}


def refuse_writes(gm: GraphModule) -> None:
    """Check a Dynamo graph and the graphs inside it.

    Raises: FcdpError that names the parameter and the line that writes to it.
    """
    for graph in [m.graph for m in gm.modules() if isinstance(m, GraphModule)]:
        gathered: dict[StorageWeakRef, str] = {}
        for node in graph.nodes:
            if node.target is UNSHARD and (storage := _storage(node)) is not None:
                gathered[storage] = str(node.args[1])
            elif gathered and _writes(node) and isinstance(written := node.args[0], Node):
                storage = _storage(written)
                key = None if storage is None else gathered.get(storage)
                if key is not None:
                    raise lost_write(key, _line(node))
        # Ops that write as a side effect, such as an embedding with max_norm, raise the value's version.
        for node in graph.nodes:
            if node.target is UNSHARD and _version(node):
                raise lost_write(str(node.args[1]), _line(next(iter(node.users))))


def _version(node: Node) -> int:
    value = node.meta.get("example_value")
    return value._version if isinstance(value, Tensor) else 0


def _writes(node: Node) -> bool:
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        if node.target in _WRITING_OPERATORS:
            return True
        name = getattr(node.target, "__name__", "")
    else:
        return False
    is_in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return is_in_place and bool(node.args)


def _storage(node: Node) -> StorageWeakRef | None:
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())


def _line(node: Node) -> str:
    """The last source line of the stack trace, which a line of Python's `^` markers may follow."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    source = [line for line in trace if line.strip("^~ ")]
    return source[-1] if source else str(node.target)
