"""What the training loop computes of sharded parameters: `model.head.weight.norm()`.

[Note: meeting whole tensors] An operation on home shards gives a DTensor, which torch does not let meet a
plain tensor: `loss + 0.1 * weight.norm()` fails, or, where the plain one is a scalar, torch takes this rank's
value for that of all ranks.  So such a DTensor becomes whole where it meets a plain tensor.  Its gradient is
averaged over the ranks, as the model's are: the loss of the job is the mean of the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Replicate, Shard

from fcdp_compile.errors import FcdpError
from fcdp_compile.layout import chunk_rows
from fcdp_compile.torch_compat import storage_id, tree_leaves, tree_map_only, without_torch_function


class Sharded(DTensor):
    """What home shards and what is computed of them have in common."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is typed as an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and not isinstance(args[1], DTensor):
            args = (args[0], args[0].cut(args[1].expand(args[0].shape)), *args[2:])
        _refuse_lost(func, args)
        _refuse_plain(func, args, kwargs)
        taken, options = tree_map_only(Sharded, lambda s: s.as_dtensor(), (args, kwargs))
        if (
            func is _aten._local_scalar_dense.default
        ):  # item, float, bool; DTensor's is of this rank
            taken = tree_map_only(DTensor, _replicated, taken)
        return _derived(func, func(*taken, **options), args)

    def as_dtensor(self) -> DTensor:
        """The same as a plain DTensor."""
        return DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor of the full shape; a view of it, on its device."""
        for over, placement in enumerate(self.placements):
            if isinstance(placement, Shard):
                # As `layout`, [Note: chunk order], says: cut over the places, then over the nodes.
                rows = chunk_rows(whole.shape[placement.dim], self.device_mesh.size(over))
                mine = self.device_mesh.get_local_rank(over)
                whole = whole.narrow(placement.dim, sum(rows[:mine]), rows[mine])
        return whole

    def cut(self, whole: Tensor) -> DTensor:
        """A whole tensor of the full shape as a DTensor that is cut like this one; shares its memory."""
        return DTensor(self.part_of(whole.detach()), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """As DTensor's, but that gradients are averaged over the ranks unless grad_placements says more."""
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        whole: Tensor = _Whole.apply(_replicated(self))
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As a plain DTensor, which `torch.load` can read.
        return self.as_dtensor().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # Tensor's has no types


class Derived(Sharded):
    """A DTensor that was computed of home shards ([Note: meeting whole tensors])."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        meets = any(is_plain(v) for v in tree_leaves((args, kwargs)))
        # What is written to cannot become another tensor.
        if meets and not (_writes(func, args, kwargs) or torch.compiler.is_compiling()):
            args, kwargs = tree_map_only(DTensor, lambda d: d.full_tensor(), (args, kwargs))
        with without_torch_function():
            return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The values without autograd, sharing memory."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        # DTensor takes it and keeps its values.
        self.detach().copy_(other)

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> Derived:
        # As HomeShard's.
        made = DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        return Derived(made._local_tensor, made._spec, requires_grad=made.requires_grad)  # type: ignore[no-untyped-call]


class _Whole(Function):
    """A replicated DTensor as a plain tensor, whose gradient is averaged."""

    @staticmethod
    def forward(ctx: Any, replicated: DTensor) -> Tensor:
        ctx.mesh = replicated.device_mesh
        return replicated._local_tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:  # type: ignore[override]
        averaged = grad / ctx.mesh.size()
        for group in ctx.mesh.get_all_groups():
            dist.all_reduce(averaged, group=group)
        placements = [Replicate()] * ctx.mesh.ndim
        return DTensor.from_local(averaged, ctx.mesh, placements, run_check=False)


def is_plain(value: object) -> bool:
    """Whether a value is a tensor that DTensors do not mix with."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function of torch writes to a DTensor, told by its name: `mul_`, `__iadd__`, `out=`."""
    name: str = getattr(func, "__name__", "")
    in_place = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
    written = [args[:1] if in_place else (), kwargs.get("out")]
    return any(isinstance(v, DTensor) for v in tree_leaves(written))


_WRITING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow"))}


def _refuse_lost(func: Any, args: Any) -> None:
    """Refuse a write to what shares no memory with the parameter that it is a part of."""
    if func._schema.is_mutable and any(getattr(v, _COPY, False) for v in tree_leaves(args[:1])):
        raise FcdpError(
            "a part of a sharded parameter is a copy where the part lies across ranks, and what is written "
            "to it would be lost; write to the parameter within a block of fcdp_compile.gathered(model)"
        )


def _refuse_plain(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse that sharded values meet a whole tensor; a scalar is fine where nothing is trained.

    Raises: FcdpError.
    """
    values = tree_leaves((args, kwargs))
    plain = next((v for v in values if type(v) is Tensor), None)
    if plain is None or not (plain.ndim or _is_training(values)):
        return
    key = next((k for v in values if (k := getattr(v, "_fcdp_key", None)) is not None), None)
    name = (
        "a value of sharded parameters" if key is None else f"parameter {key.partition(':')[2]!r}"
    )
    raise FcdpError(
        f"{name} meets a whole tensor of shape {tuple(plain.shape)} in {func}; take "
        "fcdp_compile.full(parameter), which is the whole parameter and averages its gradient"
    )


def _is_training(values: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(getattr(v, "requires_grad", False) for v in values)


def _derived(func: Any, result: Any, args: Any) -> Any:
    """The result of an operation on home shards or `Derived`, as such if it depends on their values."""
    if func in _SAME and isinstance(args[0], Derived):
        # While compiling, too: AOTAutograd insists on the class of its inputs.
        return Derived(_local(result), result._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types
    if func in _INDEPENDENT or func._schema.is_mutable or torch.compiler.is_compiling():
        return result
    made = tree_map_only(DTensor, _of, result)
    if any(r.alias_info is not None for r in func._schema.returns):
        source = args[0]
        held = storage_id(_local(source))
        for part in (v for v in tree_leaves(made) if isinstance(v, Derived)):
            if getattr(source, _COPY, False) or storage_id(_local(part)) != held:
                setattr(part, _COPY, True)
    return made


_COPY = "_fcdp_copy"
"""The attribute of what torch calls a view of sharded values and is a copy of them."""

_LOCAL: Any = DTensor.__dict__["_local_tensor"]

_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.clone.default, _aten.alias.default)
"""Operations that change nothing about a `Derived`."""

_INDEPENDENT = (
    _aten.detach.default,  # what one takes to have the shard
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
)
"""Operations whose results stay DTensors, such as an optimizer's states."""


def _local(dtensor: DTensor) -> Tensor:
    """The local tensor, as it is (`home_shard`, [Note: released shards])."""
    local: Tensor = _LOCAL.__get__(dtensor)
    return local


def _replicated(dtensor: DTensor) -> DTensor:
    return dtensor.redistribute(placements=[Replicate()] * dtensor.device_mesh.ndim)


def _of(dtensor: DTensor) -> Any:
    if type(dtensor) is not DTensor or type(dtensor._local_tensor) is not Tensor:
        return dtensor
    return Derived(dtensor._local_tensor, dtensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
