"""What the training loop computes of sharded parameters: `model.head.weight.norm()`.

[Note: meeting whole tensors] An operation on home shards gives a DTensor, which torch does not let meet a
plain tensor: `loss + 0.1 * weight.norm()` fails, or, where the plain one is a scalar, torch takes this rank's
value for that of all ranks.  So such a DTensor becomes whole where it meets a plain tensor.  Its gradient is
averaged over the ranks, as the model's are: the loss of the job is the mean of the ranks' losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Replicate

from fcdp_compile.errors import FcdpError
from fcdp_compile.torch_compat import tree_leaves, tree_map_only, without_torch_function


class Derived(DTensor):
    """A DTensor that was computed of home shards ([Note: meeting whole tensors])."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = [v for v in tree_leaves((args, kwargs)) if is_plain(v)]
        if (plain or func is Tensor.item) and not torch.compiler.is_compiling():
            args, kwargs = tree_map_only(DTensor, lambda d: d.full_tensor(), (args, kwargs))
        with without_torch_function():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is typed as an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_plain(func, args, kwargs)
        args, kwargs = tree_map_only(Derived, _as_dtensor, (args, kwargs))
        if func is _aten.detach.default:  # a compiler wants the class that it gave
            return _made(func(*args))
        return derived(func, func(*args, **kwargs))

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> Derived:
        # As HomeShard's.
        return _made(
            DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """As DTensor's, but that gradients are averaged over the ranks unless grad_placements says more."""
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        return averaging_full_tensor(self)


def averaging_full_tensor(dtensor: DTensor) -> Tensor:
    """The whole tensor; each rank's gradient for it is averaged with those of the others."""
    replicated = dtensor.redistribute(placements=[Replicate()] * dtensor.device_mesh.ndim)
    whole: Tensor = _Whole.apply(replicated)  # type: ignore[no-untyped-call]
    return whole


class _Whole(Function):
    """A replicated DTensor as a plain tensor, whose gradient is averaged."""

    @staticmethod
    def forward(ctx: Any, replicated: DTensor) -> Tensor:
        ctx.mesh = replicated.device_mesh
        return replicated._local_tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        averaged = (grad / ctx.mesh.size()).contiguous()
        for group in ctx.mesh.get_all_groups():
            dist.all_reduce(averaged, group=group)
        placements = [Replicate()] * ctx.mesh.ndim
        return DTensor.from_local(averaged, ctx.mesh, placements, run_check=False)


def is_plain(value: object) -> bool:
    """Whether a value is a tensor that DTensors do not mix with."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def refuse_plain(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse that sharded values meet a whole tensor; a scalar is fine where nothing is trained.

    Raises: FcdpError.
    """
    values = tree_leaves((args, kwargs))
    plain = next((v for v in values if type(v) is Tensor), None)
    if plain is None or not (plain.ndim or torch.is_grad_enabled()):
        return
    key = next((k for v in values if (k := getattr(v, "_fcdp_key", None)) is not None), None)
    name = (
        "a value of sharded parameters" if key is None else f"parameter {key.partition(':')[2]!r}"
    )
    raise FcdpError(
        f"{name} meets a whole tensor of shape {tuple(plain.shape)} in {func}; take "
        "fcdp_compile.full(parameter), which is the whole parameter and averages its gradient"
    )


def derived(func: Any, result: Any) -> Any:
    """The result of an operation on home shards or `Derived`, as such if it depends on their values."""
    if func in _INDEPENDENT or func._schema.is_mutable or torch.compiler.is_compiling():
        return result
    return tree_map_only(DTensor, _of, result)


_aten = torch.ops.aten
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


def _of(dtensor: DTensor) -> Any:
    if type(dtensor) is not DTensor or type(dtensor._local_tensor) is not Tensor:
        return dtensor
    return _made(dtensor)


def _made(dtensor: DTensor) -> Derived:
    return Derived(dtensor._local_tensor, dtensor._spec, requires_grad=dtensor.requires_grad)  # type: ignore[no-untyped-call]


def _as_dtensor(value: Derived) -> DTensor:
    return DTensor(value._local_tensor, value._spec, requires_grad=value.requires_grad)
