"""Which rank writes which rows of a parameter: each row once, even if several ranks have a copy."""

from __future__ import annotations

from fcdp_compile.checkpointing.format.record import CutTensor
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.params.spec import Home
from fcdp_compile.strategy import Scope


def cut(name: str, dtype: str, spec: ParamSpec, mesh: Home, index: int) -> CutTensor:
    """Return how the home shards of a parameter, or of a tensor that is cut like them, are written.

    If all nodes or all ranks have a copy, one of them writes it.  index: the tensor's number among all
    tensors; it selects the writer, so that each node or rank writes some tensors.  Ranks without rows are
    left out.
    """
    layout, scope = spec.layout, spec.strategy.home
    g = mesh.ranks_per_node
    if layout.dim is None or scope is Scope.NONE:
        return CutTensor(
            name=name,
            dtype=dtype,
            shape=layout.shape,
            dim=None,
            rows=(1,),
            files=(index % mesh.ranks,),
        )
    if scope is Scope.GLOBAL:
        owners = [(c % mesh.nodes) * g + c // mesh.nodes for c in range(layout.ranks)]
    else:
        owners = [(index % mesh.nodes) * g + place for place in range(g)]
    parts = [(rows, owner) for rows, owner in zip(layout.rows, owners, strict=True) if rows]
    return CutTensor(
        name=name,
        dtype=dtype,
        shape=layout.shape,
        dim=layout.dim,
        rows=tuple(rows for rows, _ in parts),
        files=tuple(owner for _, owner in parts),
    )
