"""Values that the training loop computes from sharded parameters: `model.head.weight.norm()`.

[Note: meeting whole tensors] An operation on home shards gives a DTensor, and torch does not mix DTensors
with plain tensors: `loss + 0.1 * weight.norm()` fails, or, if the plain tensor is a scalar, torch takes this
rank's value for the value of all ranks.  So a DTensor computed from home shards becomes whole when it is
combined with a plain tensor.  Its gradient is averaged over the ranks, like the model's gradients: the job's
loss is the mean of the ranks' losses.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from fcdp_compile.core.params.home_collectives import everywhere, part_of
from fcdp_compile.core.params.home_tensor import HomeTensor, as_home_tensor
from fcdp_compile.core.params.whole_ops import is_plain
from fcdp_compile.core.ranks.inner_mesh import all_ranks_of
from fcdp_compile.errors import FcdpError
from fcdp_compile.torch_compat import tree_leaves, tree_map_only
from fcdp_compile.torch_compat.autograd import without_torch_function
from fcdp_compile.torch_compat.compilers import skip_frames_below


class Sharded(HomeTensor):
    """The base class of home shards and of the DTensors computed from them."""

    __slots__ = ()

    @classmethod
    @skip_frames_below
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is typed as an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_copy = func is _aten.copy_.default and isinstance(args[0], Sharded)
        if is_copy and not isinstance(args[1], DTensor):
            args = (args[0], args[0].cut(args[1].expand(args[0].shape)), *args[2:])
        _refuse_plain(func, args, kwargs)
        return _derived(func, super().__torch_dispatch__(func, types, args, kwargs), args)

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor of the full shape; a view of it, on its device."""
        return part_of(self, whole)

    def cut(self, whole: Tensor) -> DTensor:
        """A whole tensor of the full shape as a DTensor that is cut like this one; shares its memory."""
        return DTensor(self.part_of(whole.detach()), self._spec, requires_grad=False)

    @skip_frames_below
    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Like DTensor's, but gradients are averaged over the ranks unless grad_placements is given."""
        if grad_placements is not None:
            return super().full_tensor(grad_placements=grad_placements)
        replicated = self.redistribute(placements=everywhere(self.device_mesh))
        whole: Tensor = _Whole.apply(replicated)  # type: ignore[no-untyped-call]
        return whole


class Derived(Sharded):
    """A DTensor that was computed from home shards ([Note: meeting whole tensors])."""

    __slots__ = ()

    @classmethod
    @skip_frames_below
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        meets = any(is_plain(v) for v in tree_leaves((args, kwargs)))
        # The op must write to the tensor it was given, not to a whole copy of that tensor.
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
        # DTensor accepts `d.data = other`, but keeps its old values.
        self.detach().copy_(other)


class _Whole(Function):
    """Turns a replicated DTensor into a plain tensor, and averages the gradient over the ranks."""

    @staticmethod
    def forward(replicated: DTensor) -> Tensor:
        return replicated._local_tensor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[DTensor], output: Tensor) -> None:
        ctx.mesh = inputs[0].device_mesh

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        averaged = (grad / ctx.mesh.size()).contiguous()
        every = all_ranks_of(ctx.mesh)
        assert every is not None, "home shards are on a home mesh"
        dist.all_reduce(averaged, group=every.mesh.get_group())
        return DTensor.from_local(averaged, ctx.mesh, everywhere(ctx.mesh), run_check=False)


class _Local(Function):
    """Returns the local tensor of a home shard, and gives the gradient the strides of the parameter.

    Up to torch 2.13, DTensor's own `to_local` takes a gradient's strides from its local part.  Where columns
    are cut unevenly, they differ from the parameter's, and autograd copies each such gradient; torch 2.11
    gathers the gradient from all ranks for this copy, and leaves it whole.
    """

    generate_vmap_rule = True  # for transforms of torch.func over the model's inputs

    @staticmethod
    def forward(shard: DTensor) -> Tensor:
        local = shard._local_tensor
        return local.view_as(local)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[DTensor], output: Tensor) -> None:
        ctx.spec = inputs[0]._spec

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> DTensor:
        # Not `from_local`, which would bring a gradient in host memory to the mesh's device.
        made = DTensor(grad.contiguous(), ctx.spec, requires_grad=False)
        return as_home_tensor(made)  # gradients of a compiled backward had this class in the trace


def local_of(shard: HomeTensor, **options: Any) -> Tensor:
    """The local tensor of a home shard, as `to_local` returns it; does not bring back its values."""
    if options or not torch.is_grad_enabled():
        return DTensor.to_local(shard, **options)
    local: Tensor = _Local.apply(shard)  # type: ignore[no-untyped-call]
    return local


def _writes(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a function of torch writes to a DTensor, judged by its name: `mul_`, `__iadd__`, `out=`."""
    name: str = getattr(func, "__name__", "")
    in_place = name in _WRITING or (name.endswith("_") and not name.endswith("__"))
    written = [args[:1] if in_place else (), kwargs.get("out")]
    return any(isinstance(v, DTensor) for v in tree_leaves(written))


_WRITING = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow"))}


def _refuse_plain(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse to combine sharded values with a whole tensor in an op whose gradient may be needed.

    Raises: FcdpError.
    """
    if not torch.is_grad_enabled():
        return
    values = tree_leaves((args, kwargs))
    if (plain := next((v for v in values if _is_ordinary(v)), None)) is None:
        return
    # DistributedDataParallel concatenates parameters and buffers before it broadcasts them.
    wrapped = func is torch.ops.aten.cat.default
    if not (wrapped or any(getattr(v, "requires_grad", False) for v in values)):
        return
    key = next((k for v in values if (k := getattr(v, "_fcdp_key", None)) is not None), None)
    name = (
        "a value of sharded parameters" if key is None else f"parameter {key.partition(':')[2]!r}"
    )
    raise FcdpError(
        f"{func} combines {name}, of which this rank has only a part, with an ordinary tensor of shape "
        f"{tuple(plain.shape)}; use fcdp_compile.full(parameter): it returns the whole parameter, and its "
        "gradient is averaged over the ranks"
        + ("; do not wrap a sharded model in DistributedDataParallel" if wrapped else "")
    )


def _is_ordinary(value: object) -> bool:
    """Whether a value is a plain tensor or parameter, and not one that stands for others in a trace."""
    return type(value) is Tensor or (isinstance(value, nn.Parameter) and is_plain(value))


def _derived(func: Any, result: Any, args: Any) -> Any:
    """Make a result of an op on home shards or `Derived` a `Derived` if it depends on their values."""
    if func in _SAME and isinstance(args[0], Derived):
        return _made(result)  # also while compiling: AOTAutograd insists on the class of its inputs
    if func in _INDEPENDENT or func._schema.is_mutable or torch.compiler.is_compiling():
        return result
    return tree_map_only(HomeTensor, lambda t: _made(t) if type(t) is HomeTensor else t, result)


_aten = torch.ops.aten
_SAME = (_aten.detach.default, _aten.clone.default, _aten.alias.default)
"""Operations that change nothing about a `Derived`."""

_INDEPENDENT = (
    _aten.detach.default,  # users detach a parameter to get its shard
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


def _made(dtensor: DTensor) -> Derived:
    """Change the class of this DTensor object to `Derived`."""
    dtensor.__class__ = Derived
    assert isinstance(dtensor, Derived)
    return dtensor
