"""Ops on sharded tensors that need only the local tensors.

These are elementwise ops whose tensors are all cut alike or hold one element that every rank has, torch's
elementwise ops on lists of tensors (`_foreach_…`) and its fused optimizers.  Some tensors of the lists may be
plain (`shard(ignored_params=…)`).  An elementwise op cuts plain tensors (`whole_ops`, [Note: plain tensors]).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcdp_compile.core.params.home_collectives import has_part_of_shape, part_of
from fcdp_compile.torch_compat.distributed import dtensor_of
from fcdp_compile.torch_compat.placements import NodeShard

LocalOf = Callable[[DTensor], Tensor]

_aten = torch.ops.aten

_ON_LISTS = (
    "abs add addcdiv addcmul ceil clamp_max clamp_min clone copy div erf exp expm1 floor frac lerp log log10 "
    "log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sqrt sub tanh trunc zero"
)
_LIST_OPS = {
    getattr(_aten, name)
    for root in _ON_LISTS.split()
    for name in (f"_foreach_{root}", f"_foreach_{root}_")
    if hasattr(_aten, name)
} | {_aten._fused_adagrad_, _aten._fused_adam_, _aten._fused_adamw_, _aten._fused_sgd_}

_ALSO_ELEMENTWISE = {
    _aten.copy_.default,
    _aten.fill_.Scalar,
    _aten.index_put_.default,  # with a mask of booleans
    _aten.masked_fill.Tensor,
    _aten.masked_fill_.Scalar,
    _aten.masked_fill_.Tensor,
    _aten.where.ScalarOther,
    _aten.where.ScalarSelf,
    _aten.zero_.default,
}
"""Elementwise ops that torch does not tag as pointwise."""


_COPIES = {
    _aten._to_copy,
    _aten.alias,
    _aten.clone,
    _aten.detach,
    _aten.empty_like,
    _aten.full_like,
    _aten.ones_like,
    _aten.zeros_like,
}
"""Ops whose result has the shape of their first argument, element by element."""


def mapped(change: Callable[[DTensor], Any], values: Iterable[Any]) -> list[Any]:
    """Replace each DTensor among an op's arguments, also within lists, by `change(tensor)`."""
    return [
        change(value)
        if isinstance(value, DTensor)
        else mapped(change, value)
        if isinstance(value, (list, tuple))
        else value
        for value in values
    ]


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, with the members of each list or tuple in its place."""
    for value in values:
        yield from value if isinstance(value, (list, tuple)) else (value,)


class _Elsewhere(Exception):
    """An op needs more than the local tensors."""


def run_locally(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], local_of: LocalOf
) -> Any:
    """Run an op on the local tensors; NotImplemented if the op needs more.

    For elementwise ops and for ops on lists.  Results are DTensors that are cut like the first argument.
    """
    is_elementwise, is_on_lists = _kind(func)
    # While a graph is traced, torch has rules for all but tensors with home nodes.
    if not (args and any(map(has_home_node, args[0] if is_on_lists else args[:1]))):
        local_of = partial(_untraced, local_of)
    try:
        if func is _aten.index_put_.default and isinstance(args[2], Tensor) and args[2].dim():
            raise _Elsewhere  # its values are rows that the mask counts, not a tensor of the shape
        if is_elementwise and (is_in_place(func) or _needs_local(args)):
            main = args[0] if is_in_place(func) else _widest(args)
            locals_ = [
                _masks(value, main, local_of)
                if isinstance(value, list)
                else _local(value, main, local_of)
                for value in args
            ]
            more = {name: _local(value, main, local_of) for name, value in kwargs.items()}
            result = func(*locals_, **more)
            return main if is_in_place(func) else _like(result, main, local_of)
        if is_on_lists:
            mains = args[0]
            lists = [_locals(value, mains, local_of) for value in args]
            more = {name: _local(value, None, local_of) for name, value in kwargs.items()}
            results = func(*lists, **more)
            return results and [_like(r, m, local_of) for r, m in zip(results, mains, strict=True)]
    except _Elsewhere:
        pass
    return NotImplemented


@functools.cache
def is_in_place(func: Any) -> bool:
    """Whether an op writes to its first argument, as torch's tag for this says since torch 2.13."""
    first = next(iter(func._schema.arguments), None)
    return first is not None and first.alias_info is not None and first.alias_info.is_write


@functools.cache
def _kind(func: Any) -> tuple[bool, bool]:
    """Whether an op is elementwise and returns one tensor; whether it is an op on lists."""
    is_elementwise = (
        torch.Tag.pointwise in func.tags
        or func in _ALSO_ELEMENTWISE
        or func.overloadpacket in _COPIES
    )
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    returns_one = [str(r.type) for r in func._schema.returns] == ["Tensor"]
    return is_elementwise and returns_one and not is_random, func.overloadpacket in _LIST_OPS


def has_home_node(value: Any) -> bool:
    """Whether one node owns all rows of a DTensor (`layout` [Note: home nodes]).

    torch's own rules for ops lose this: they would take the results for rows that all nodes share.
    """
    return isinstance(value, DTensor) and any(isinstance(p, NodeShard) for p in value.placements)


def _masks(indices: list[Any], main: Any, local_of: LocalOf) -> list[Any]:
    """Boolean masks of `main` as local tensors; no row indices, since each shard numbers its own rows."""
    if not all(isinstance(i, DTensor) and i.dtype == torch.bool for i in indices):
        raise _Elsewhere
    return [_local(i, main, local_of) for i in indices]


def _locals(value: Any, mains: Sequence[Any], local_of: LocalOf) -> Any:
    """An argument of an op on lists as local tensors."""
    if not isinstance(value, (list, tuple)):
        return _local(value, None, local_of)
    if not (value and isinstance(value[0], Tensor)):
        return value
    return [_local(v, main, local_of) for v, main in zip(value, mains, strict=True)]


def _local(value: Any, main: Any, local_of: LocalOf) -> Any:
    """An argument as a local tensor.  main: the argument that the op writes to or pairs with it, or None."""
    if not isinstance(value, DTensor):
        if isinstance(value, Tensor) and isinstance(main, DTensor) and value.dim():
            return _cut(value, main)
        return value
    if value is main:
        needed = not any(p.is_partial() for p in value.placements)
    elif isinstance(main, DTensor) and _are_alike(value, main):
        needed = True  # like `main` itself
    else:
        needed = not value.dim() and all(p.is_replicate() for p in value.placements)
    if not needed:
        raise _Elsewhere
    return local_of(value)


def _widest(args: Sequence[Any]) -> Any:
    """The sharded tensor that has the shape of an elementwise op's result; None if none has it."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return next((t for t in tensors if isinstance(t, DTensor) and t.shape == shape), None)


def _needs_local(args: Sequence[Any]) -> bool:
    """Whether torch's own rule for an elementwise op would not do."""
    return any(
        has_home_node(a) if isinstance(a, DTensor) else isinstance(a, Tensor) and a.dim() > 0
        for a in args
    )


def _cut(whole: Tensor, main: DTensor) -> Tensor:
    """This rank's part of a plain tensor that an elementwise op combines with `main`."""
    is_whole = torch.broadcast_shapes(whole.shape, main.shape) == main.shape
    if not is_whole or any(p.is_partial() for p in main.placements):
        raise _Elsewhere
    if has_part_of_shape(main, whole.shape):
        raise _Elsewhere
    return part_of(main, whole.expand(main.shape))


def _untraced(local_of: LocalOf, value: DTensor) -> Tensor:
    local = local_of(value)
    if type(local) is not Tensor:
        raise _Elsewhere
    return local


def _are_alike(one: DTensor, other: DTensor) -> bool:
    return (
        one.placements == other.placements
        and one.device_mesh == other.device_mesh
        and one.shape == other.shape
    )


def _like(result: Tensor, main: Any, local_of: LocalOf) -> Tensor:
    """A result of an op on lists as a DTensor, cut like the matching tensor of the first list."""
    if not isinstance(main, DTensor):
        return result
    if result.dtype == main.dtype and result.stride() == local_of(main).stride():
        return DTensor(result, main._spec, requires_grad=False)
    mesh, stride = main.device_mesh, main.stride()
    return dtensor_of(result, mesh, main.placements, shape=main.shape, stride=stride)


def communicates_never(func: Any, tensors: Sequence[DTensor]) -> bool:
    """Whether an op needs only the local tensors; decided without asking DTensor, which takes 40 us."""
    if any(t.placements != tensors[0].placements for t in tensors):
        return False
    is_elementwise = torch.Tag.pointwise in func.tags or func.overloadpacket in _LOCAL
    return is_elementwise and not any(p.is_partial() for p in tensors[0].placements)


def fitted(func: Any, args: Sequence[Any], local: Tensor, stride: Sequence[int]) -> Tensor:
    """The local tensor with which DTensor runs an op on a tensor of these strides.

    For a norm over no rows it is one row that changes no norm of all rows: torch refuses the infinity norm of
    an empty tensor.  For a view its dimensions are in the order in memory that the strides tell: results of
    torch's rules need not have the strides that they claim, which decide about views.
    """
    if func in VIEWS:
        order = sorted(range(local.dim()), key=lambda dim: -stride[dim])
        ordered = local.permute(order)
        if not ordered.is_contiguous():
            local = ordered.contiguous().permute([order.index(dim) for dim in range(local.dim())])
        return local
    if local.numel() or func.overloadpacket not in _NORMS or type(local) is not Tensor:
        return local
    over = args[2] if len(args) > 2 and args[2] is not None else range(local.dim())
    if all(local.shape[dim] for dim in over):
        return local
    is_least = len(args) > 1 and args[1] < 0
    return local.new_full([n or 1 for n in local.shape], float("inf") if is_least else 0)


def loses_home_nodes(func: Any, args: Sequence[Any], tensors: Sequence[DTensor]) -> bool:
    """Whether torch's rule for an op would lose the home node of one of these tensors.

    The norm of all rows is the only result that needs no placement.
    """
    of_all = func.overloadpacket in _NORMS and (len(args) < 3 or args[2] is None)
    return not of_all and any(has_home_node(t) for t in tensors)


_NORMS = {_aten.linalg_vector_norm, _aten._foreach_norm}
_LOCAL = {*_NORMS, _aten.detach, _aten.zeros_like}

VIEWS = {_aten.view.default, _aten.view_copy.default, _aten._unsafe_view.default}

RESHAPES = {
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.t_.default: _aten.t.default,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
}
"""Ops that change the shape of their first argument in place, and those that return a view instead."""
