"""Ops on sharded tensors that every rank runs on whole tensors, of which it keeps its part.

[Note: random numbers] An op that draws random numbers for a sharded tensor draws for the whole tensor on all
ranks.  So with equal generators the values are those of the unsharded model on every mesh, and the generators
are equal afterwards.  The op needs memory for the whole tensor meanwhile.  If the generators of the ranks
differ, each row has the numbers of the rank that owns it; what several ranks own would differ between them.

[Note: plain tensors] A plain tensor that meets a sharded one is taken for a whole tensor, equal on all ranks.
An elementwise op cuts it (`local_ops`).  For any other op every rank gathers the sharded tensors;
the result may depend on values that only this rank has, so it is a plain tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcdp_compile.core.params.home_collectives import everywhere, has_part_of_shape, part_of
from fcdp_compile.core.params.local_ops import LocalOf, flat, mapped
from fcdp_compile.errors import FcdpError, MixedTensorsError
from fcdp_compile.torch_compat.distributed import dtensor_of

_aten = torch.ops.aten


@functools.cache
def reached(func: Any, *, only_written: bool = False) -> tuple[tuple[int, str], ...]:
    """The positions and names of the arguments that an op writes to or returns views of."""
    arguments = enumerate(func._schema.arguments)
    return tuple(
        (i, a.name)
        for i, a in arguments
        if (func, a.name) in _WRITES
        or (a.alias_info is not None and (a.alias_info.is_write or not only_written))
    )


_WRITES = {(_aten.native_batch_norm.default, name) for name in ("running_mean", "running_var")}
"""Ops and names of arguments that the ops write to though their schemas do not say so."""


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that an op writes to."""
    places = reached(func, only_written=True)
    return list(flat(args[at] if at < len(args) else kwargs.get(name) for at, name in places))


@functools.cache
def draws(func: Any) -> bool:
    """Whether an op draws random numbers; torch does not tag `random_`."""
    return torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket is _aten.random_


@functools.cache
def takes_out(func: Any) -> bool:
    """Whether an op writes its result to an argument such as `out=`."""
    return any(
        a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
        for a in func._schema.arguments
    )


def is_plain(value: object) -> bool:
    """Whether a value is a tensor but not a DTensor."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


@functools.cache
def returns_views(func: Any) -> bool:
    """Whether an op returns views of its arguments."""
    returns = func._schema.returns
    return not func._schema.is_mutable and any(r.alias_info is not None for r in returns)


def refuse_collective(func: Any) -> None:
    """Refuse collectives of torch.distributed, which DistributedDataParallel starts when it wraps a model.

    Raises: FcdpError.
    """
    if func.namespace == "c10d":
        raise FcdpError(
            f"{func} got a tensor that fcdp has sharded and communicates for; do not wrap a sharded model in "
            "DistributedDataParallel or FSDP (in Lightning Fabric, use FcdpStrategy; in Accelerate, the "
            "Accelerator of fcdp), and outside of them use fcdp_compile.full(parameter), the whole parameter"
        )


def meets_plain(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], sharded: DTensor
) -> bool:
    """Whether an op combines sharded tensors with plain ones that are no scalars.

    Raises: MixedTensorsError if this rank's part of a sharded tensor may be meant.
    """
    written = [id(t) for t in written_by(func, args, kwargs)]
    found = False
    for tensor in flat((*args, *kwargs.values())):
        if not is_plain(tensor) or not tensor.dim():
            continue
        if id(tensor) in written or has_part_of_shape(sharded, tensor.shape):
            raise MixedTensorsError(
                f"{func} got a sharded tensor of shape {tuple(sharded.shape)} and a plain one of shape "
                f"{tuple(tensor.shape)}, which it writes to or which may be one rank's part; make the plain "
                "one with torch.zeros_like(parameter) or combine it with full_tensor() of the sharded one "
                "(docs/optimizers.md lists the optimizers that can step sharded parameters)"
            )
        found = True
    return found


def run_whole(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    gather: LocalOf,
    local_of: LocalOf,
    *,
    cuts_results: bool,
) -> Any:
    """Run an op on whole tensors, and keep this rank's part of those that it writes to.

    gather: returns a whole tensor; called on all ranks alike, and not for tensors that the op only fills.
    cuts_results: whether results are DTensors, those of the shape of the first sharded tensor cut like it.
    Else they are whole plain tensors.

    Raises: FcdpError if the op would change the shape of a sharded tensor, as one with out= may do.
    """
    wholes: dict[int, tuple[DTensor, Tensor]] = {}
    filled = _filled(func, args, kwargs)

    def whole(tensor: DTensor) -> Tensor:
        if id(tensor) not in wholes:
            is_filled = any(tensor is t for t in filled)
            made = _blank(tensor, local_of(tensor)) if is_filled else gather(tensor)
            wholes[id(tensor)] = tensor, made
        return wholes[id(tensor)][1]

    given = mapped(whole, args)
    values = dict(zip(kwargs, mapped(whole, kwargs.values()), strict=True))
    found = func(*given, **values)
    for tensor in written_by(func, args, kwargs):
        if not isinstance(tensor, DTensor):
            continue
        made = wholes[id(tensor)][1]
        if made.shape != tensor.shape:
            raise FcdpError(
                f"{func} cannot give a sharded tensor of shape {tuple(tensor.shape)} the shape "
                f"{tuple(made.shape)}; let it write to a plain tensor, and copy that to a sharded one "
                "(parameter.copy_(plain))"
            )
        local_of(tensor).copy_(part_of(tensor, made))
    like, _ = next(iter(wholes.values()))
    mesh = like.device_mesh
    originals = {id(made): tensor for tensor, made in wholes.values()}

    def cut(result: Any) -> Any:
        if isinstance(result, (list, tuple)):
            return type(result)(map(cut, result))
        if not isinstance(result, Tensor) or id(result) in originals:
            return originals.get(id(result), result)
        if not cuts_results:
            return result
        if result.shape == like.shape and not all(p.is_replicate() for p in like.placements):
            part = part_of(like, result).clone(memory_format=torch.contiguous_format)
            stride = torch.empty(result.shape, device="meta").stride()
            return dtensor_of(part, mesh, like.placements, shape=result.shape, stride=stride)
        shape, stride = result.shape, result.stride()
        return dtensor_of(result, mesh, everywhere(mesh), shape=shape, stride=stride)

    return cut(found)


def _filled(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments whose values an op does not read."""
    if draws(func) and func.overloadpacket in _FILLS:
        return list(args[:1])
    if not takes_out(func):
        return []
    outs = {name for _, name in reached(func, only_written=True)}
    read = list(flat((*args, *(v for name, v in kwargs.items() if name not in outs))))
    written = written_by(func, args, kwargs)
    return [out for out in written if not any(out is tensor for tensor in read)]


_FILLS = {
    *(_aten.bernoulli_, _aten.cauchy_, _aten.exponential_, _aten.geometric_, _aten.log_normal_),
    *(_aten.normal_, _aten.random_, _aten.uniform_),
    *(_aten.rand_like, _aten.randint_like, _aten.randn_like),
}
"""Ops that draw the values of their first argument, or of a tensor like it."""


def _blank(tensor: DTensor, local: Tensor) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=local.device
    )
