"""Which rank writes which rows of a parameter: each row once, even if several ranks have a copy."""

from __future__ import annotations

from fcdp_compile.checkpointing.format.record import CutTensor, PartOf
from fcdp_compile.params.layout import ParamLayout
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.params.spec import Home
from fcdp_compile.strategy import Scope


def cut(
    name: str, dtype: str, spec: ParamSpec, mesh: Home, sharers: int, number: int
) -> tuple[CutTensor, ...]:
    """Return how the home shards of a parameter, or of a tensor that is cut like them, are written.

    If all nodes or all ranks have a copy, one of them writes it.  Ranks without rows are left out.

    mesh: N and g.  sharers: t, how many ranks share each parameter ("tp"); if they cut it, each part is a
    tensor of its own.  number: the tensor's number among all tensors; it selects the writer, so that each
    node or rank writes some tensors.
    """
    is_cut = spec.inner is not None and spec.inner.dim is not None
    found = []
    for index in range(sharers) if is_cut else [number % sharers]:
        layout = spec.part_layout(index)
        dim, rows, owners = _owned(layout, spec.strategy.home, mesh, number)
        parts = [(count, owner) for count, owner in zip(rows, owners, strict=True) if count]
        found.append(
            CutTensor(
                name=name,
                dtype=dtype,
                shape=layout.shape,
                dim=dim,
                rows=tuple(count for count, _ in parts),
                files=tuple(owner * sharers + index for _, owner in parts),
                part_of=_part_of(spec, index),
            )
        )
    return tuple(found)


def _owned(
    layout: ParamLayout, scope: Scope, mesh: Home, number: int
) -> tuple[int | None, tuple[int, ...], list[int]]:
    """Return the cut dimension, and for each part along it the number of rows and the rank that writes it."""
    g = mesh.ranks_per_node
    if layout.dim is None or scope is Scope.NONE:
        return None, (1,), [number % mesh.ranks]
    if scope is Scope.GLOBAL:
        owners = [(c % mesh.nodes) * g + c // mesh.nodes for c in range(layout.ranks)]
    else:
        owners = [(number % mesh.nodes) * g + place for place in range(g)]
    return layout.dim, layout.rows, owners


def _part_of(spec: ParamSpec, index: int) -> PartOf | None:
    """Return the part of the whole parameter that a rank of a "tp" group has; None if it has all of it."""
    within = None if spec.inner is None else spec.inner.within(index)
    if within is None:
        return None
    first, rows = tuple(run.first for run in within.runs), within.runs[0].rows
    return PartOf(shape=spec.whole_shape, dim=within.dim, first=first, rows=rows)
