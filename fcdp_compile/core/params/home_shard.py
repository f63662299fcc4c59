"""The parameter that `shard` leaves in a model: a DTensor that holds this rank's home shard.

[Note: released shards]
A frozen home shard's device memory can be freed while the cache, or at first plain host memory, holds its
values (`release`).
The shard's tensor object stays, because graphs and guards refer to it, but its storage has no bytes, and
reading it crashes.  So every access to the values first calls `bring_back`, which copies them to the device
again: ops (`__torch_dispatch__`), `to_local` and similar methods, `.data`, the attribute `_local_tensor`.

One reader must not bring anything back: Dynamo's guards read `_local_tensor` before every call of a compiled
model, and AOTAutograd takes the shard apart (`__tensor_flatten__`) and passes the tensor on to our graph,
which does not read it.  So while the model is being called (`Gate.is_called`) and nothing is being compiled,
both return the tensor as it is, and a graph of ours that does read a shard asks for it with
`bring_back_inputs`.

A shard is released only if no other tensor shares its storage.  When the attribute hands out the shard's
tensor object, the shard keeps an alias of it instead, so that the object counts as another tensor.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fcdp_compile.core.params.derived import Sharded, local_of
from fcdp_compile.core.params.gate import Gate
from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.whole_ops import is_plain
from fcdp_compile.core.ranks.inner_mesh import INTER, INTRA, TP
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.strategy import Scope
from fcdp_compile.torch_compat.autograd import without_modes
from fcdp_compile.torch_compat.compilers import is_tracing
from fcdp_compile.torch_compat.distributed import dtensor_of
from fcdp_compile.torch_compat.placements import NodeShard, one_run_only
from fcdp_compile.torch_compat.tensors import storage_id, storage_uses

KEY = "_fcdp_key"
"""The attribute of a sharded parameter that `key_of` reads."""

REPLACED = "_fcdp_replaced"
"""The attribute of a tensor that was a parameter before `shard`: the parameter's name."""


def _meeting(name: str) -> Callable[[HomeShard, Any], Any]:
    """Make an operator that can combine a home shard with a plain tensor (`derived`)."""
    operator: Callable[[Tensor, Any], Any] = getattr(Tensor, name)

    def operate(self: HomeShard, other: Any) -> Any:
        is_met = is_plain(other) and not torch.compiler.is_compiling()
        return operator(self.view_as(self) if is_met else self, other)

    return operate


def _brought_back(name: str) -> Callable[..., Any]:
    """Make a method of `Sharded` that reads memory bring a released home shard back first."""
    method: Callable[..., Any] = getattr(Sharded, name)

    @functools.wraps(method)
    def call(self: HomeShard, *args: Any, **options: Any) -> Any:
        self.bring_back()
        return method(self, *args, **options)

    return call


class HomeShard(Sharded):
    """A DTensor parameter whose `.data` can be assigned and whose memory can be released.

    A plain DTensor takes `p.data = other` without complaint and keeps its old values, silently (torch 2.11
    to 2.13: assignment swaps the outer tensor, which has no storage).  Here `other` may be a DTensor of any
    placements and mesh or a whole tensor of the full shape, of which this rank keeps its part.  The same is
    true of `p.copy_(other)`.
    """

    # The gate of the shard's model; None for gradients and for tensors made in tracing.
    _gate: Gate | None = None
    # The key of the shard's parameter (`key_of`); None as above.
    _fcdp_key: str | None = None
    # Set while the shard is released.
    _away: _Away | None = None
    # Makes isinstance(shard, nn.Parameter) true for a tensor subclass.
    _is_param = False

    @staticmethod
    def of(
        local: Tensor,
        spec: ParamSpec,
        mesh: DeviceMesh,
        *,
        requires_grad: bool,
        gate: Gate | None = None,
        key: str | None = None,
    ) -> HomeShard:
        """Wrap this rank's local shard as an `nn.Parameter` of the full shape."""
        shard = HomeShard._like(as_dtensor(local, spec, mesh))
        shard.requires_grad_(requires_grad)
        shard._gate = gate
        shard._fcdp_key = key
        return shard

    @staticmethod
    def _like(dtensor: DTensor) -> HomeShard:
        # `from_local` leaves a view, and the view keeps a second tensor of the same memory alive.
        local = dtensor._local_tensor
        shard: HomeShard = HomeShard(  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types
            local.detach() if type(local) is Tensor else local,
            dtensor._spec,
            requires_grad=dtensor.requires_grad,
        )
        shard._is_param = True
        return shard

    @classmethod
    def __tensor_unflatten__(cls, *parts: Any) -> HomeShard:
        return HomeShard._like(DTensor.__tensor_unflatten__(*parts))

    @property
    def data(self) -> Tensor:
        """The values without autograd, sharing memory; a home shard, so that `.data.copy_(whole)` works."""
        self.expose()
        return HomeShard(self.held.data, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types

    @data.setter
    def data(self, other: Tensor) -> None:
        if tuple(other.shape) != tuple(self.shape) or other.dtype != self.dtype:
            raise ArgumentError(
                f"cannot assign {other.dtype} {tuple(other.shape)} to the .data of a sharded parameter of "
                f"{self.dtype} {tuple(self.shape)}; assign a tensor of the same dtype and full shape, "
                "and resize a model before fcdp_compile.shard"
            )
        if isinstance(other, DTensor) and other.device_mesh != self.device_mesh:
            # On another mesh, such as ("inter", "intra"), the same placements mean other rows.
            other = other.full_tensor()
        if not isinstance(other, DTensor):
            part = self.part_of(other.detach())
            self._local_tensor = part.to(self.held.device).clone(
                memory_format=torch.contiguous_format
            )
            return
        if tuple(other.placements) != tuple(self.placements):
            other = other.redistribute(placements=self.placements)
        self._local_tensor = other._local_tensor.detach()

    def detach(self) -> HomeShard:
        """The values as a constant for autograd, sharing memory; `state_dict` holds these."""
        self.expose()
        return HomeShard(self.held.detach(), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types

    # --- whole tensors ------------------------------------------------------------------------------------

    def module_load(self, other: Tensor, assign: bool = False) -> HomeShard:
        """Load `other`; for `load_state_dict` when `torch.__future__` makes it swap tensors."""
        self.copy_(other)
        loaded = self.detach()
        vars(loaded).update(vars(self))
        loaded.seal = None
        return loaded

    def storage(self) -> NoReturn:
        """Refuse, because callers such as safetensors expect the bytes of a whole tensor here."""
        raise FcdpError(
            f"a sharded parameter of shape {tuple(self.shape)} has no storage of its whole values, so this "
            "rank alone cannot write the state dict; let every rank call "
            "fcdp_compile.save_pretrained(model, folder) or fcdp_compile.save, or write it within a block of "
            "fcdp_compile.gathered(model)"
        )

    @property
    def grad(self) -> Tensor | None:
        """The gradient as a HomeTensor, so that its ops communicate like the parameter's."""
        grad: Tensor | None = HomeTensor.adopt(_GRAD.__get__(self))
        return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if grad is not None and isinstance(old := _GRAD.__get__(self), HomeTensor):
            old.expose()  # the new gradient may be computed from the old one
        _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    # --- releasing: [Note: released shards] ---------------------------------------------------------------

    @property
    def held(self) -> Tensor:
        """The local shard, for callers that do not read its values; it may have no memory now."""
        held: Tensor = _SLOT.__get__(self)
        return held

    def release(self, values: Tensor | Callable[[], Tensor]) -> bool:
        """Free the shard's device memory; returns whether it is free.

        values: the shard's values on the host, which then belong to the shard, or a function that returns
        them, on any device; of the shard's shape and dtype.
        It is impossible while another tensor shares the memory, because that tensor would lose its values.
        """
        held = self.held
        if self._away is None:
            if not held.numel() or not _is_own(held):
                return False
            self._away = _Away(values, held.untyped_storage().nbytes())
            held.untyped_storage().resize_(0)
            _released[storage_id(held)] = self
        self._away = _Away(values, self._away.size_bytes)
        return True

    def to_fill(self) -> Tensor:
        """Memory of this shard's shape for other values of all of it; a released shard stays released."""
        if self._away is None:
            return self.held.detach()
        if not isinstance(own := self._away.values, Tensor):
            own = own().to("cpu", copy=True)
            self._away = _Away(own, self._away.size_bytes)
        return own

    def values(self) -> Tensor:
        """This rank's values to read, without autograd; on the host if the shard is released, as it stays."""
        if self._away is None:
            return self.held.detach()
        with without_modes():
            return found if isinstance(found := self._away.values, Tensor) else found()

    def bring_back(self) -> None:
        """Give a released shard its memory and values again; no-op for a shard that is not released."""
        if (away := self._away) is None:
            return
        held = self.held
        # The values do not change, so version counters and autograd must not record this copy.
        with without_modes():
            values = self.values()
            held.untyped_storage().resize_(away.size_bytes)
            held.data.copy_(values)
        self._away = None
        _released.pop(storage_id(held), None)

    def _given_local(self) -> Tensor:
        """The attribute `_local_tensor`.

        Who reads it may keep it and write to it, so reading breaks the seal.  The shard goes on with an alias
        of its own, so that the tensor given away counts as another user of the memory, and the shard is not
        released under it ([Note: released shards]).  While the model is called, only guards read the
        attribute: they get the tensor itself.
        """
        if self._gate is not None and self._gate.is_called:
            return self.held
        self.expose()
        held = self.held
        if self._gate is None:
            return held
        with without_modes():
            _SLOT.__set__(self, held.detach())
        return held

    def _set_local(self, local: Tensor) -> None:
        if self._away is not None:
            self._away = None
            _released.pop(storage_id(self.held), None)
        super()._set_local(local)

    _local_tensor = property(_given_local, _set_local)

    def expose(self) -> None:
        """Like HomeTensor's, but brings a released shard back first."""
        self.bring_back()
        super().expose()

    def present(self) -> Tensor:
        """The local shard, brought back first if it is released."""
        self.bring_back()
        return self.held

    def to_local(self, **options: Any) -> Tensor:
        """Like DTensor's; within a call of the model, the result is for reading alone."""
        if self._gate is None or not self._gate.is_called:
            self.expose()
        return local_of(self, **options)

    def __tensor_flatten__(self) -> Any:
        # A compiler is about to read the storage.  With torch 2.11 AOTAutograd also takes inputs apart in
        # every call, for graphs of ours, which do not read it.
        if is_tracing() or self._gate is None or not self._gate.is_called:
            self.bring_back()
        return super().__tensor_flatten__()  # type: ignore[no-untyped-call]

    redistribute, full_tensor = _brought_back("redistribute"), _brought_back("full_tensor")
    __repr__: Any = _brought_back("__repr__")  # perhaps while the model is being called
    __reduce_ex__ = _brought_back("__reduce_ex__")

    # Python calls these before the plain tensor's; functions of torch, such as torch.add, do not call these.
    __add__, __radd__ = _meeting("__add__"), _meeting("__radd__")
    __sub__, __rsub__ = _meeting("__sub__"), _meeting("__rsub__")
    __mul__, __rmul__ = _meeting("__mul__"), _meeting("__rmul__")
    __truediv__, __rtruediv__ = _meeting("__truediv__"), _meeting("__rtruediv__")
    __pow__, __rpow__ = _meeting("__pow__"), _meeting("__rpow__")
    __matmul__, __rmatmul__ = _meeting("__matmul__"), _meeting("__rmatmul__")

    def __deepcopy__(self, memo: dict[int, Any]) -> HomeShard:
        if id(self) not in memo:
            self.bring_back()
            copy = HomeShard(self.held.clone(), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types
            copy.requires_grad_(self.requires_grad)
            copy._is_param = self._is_param
            memo[id(self)] = copy
        found: HomeShard = memo[id(self)]
        return found


class _Away(NamedTuple):
    """A released shard's record: its values (`HomeShard.release`), and the size its storage had."""

    values: Tensor | Callable[[], Tensor]
    size_bytes: int


_SLOT: Any = DTensor.__dict__["_local_tensor"]
_GRAD: Any = DTensor.grad  # a descriptor, contrary to torch's types

_released: weakref.WeakValueDictionary[int, HomeShard] = weakref.WeakValueDictionary()
"""Every released shard of the process, by its storage's id, which is unique while the shard lives."""


def key_of(tensor: object) -> str | None:
    """The key of a sharded parameter (in a single process a whole tensor); None for anything else."""
    key: str | None = getattr(tensor, KEY, None)
    return key


def bring_back_inputs(values: Iterable[Any]) -> None:
    """Bring back the released shards among the tensors that a graph is about to read."""
    if _released:
        for value in values:
            if type(value) is Tensor and (shard := _released.get(storage_id(value))) is not None:
                shard.bring_back()


def _is_own(held: Tensor) -> bool:
    """Whether a tensor covers all of its storage and no other tensor shares it."""
    # Count before taking `storage` below, which adds a use.
    if held.is_inference() or storage_uses(held) != 1:
        return False
    storage = held.untyped_storage()
    # A storage is not resizable once numpy has seen it.
    return storage.resizable() and storage.nbytes() == held.nbytes


def placements_of(spec: ParamSpec) -> tuple[Placement, ...]:
    """DTensor placements on the home mesh, which may begin with "tp" (`layout`, [Note: chunk order])."""
    layout, home = spec.layout, spec.strategy.home
    found: tuple[Placement, ...] = (Replicate(), Replicate())
    if layout.dim is not None and home is not Scope.NONE:
        inter: Placement = Shard(layout.dim) if home is Scope.GLOBAL else Replicate()
        if layout.home_node is not None:
            inter = NodeShard(layout.dim, layout.home_node)
        found = (Shard(layout.dim), inter)
    return found if spec.inner is None else (one_run_only(spec.inner.placement), *found)


def as_dtensor(local: Tensor, spec: ParamSpec, mesh: DeviceMesh) -> DTensor:
    """Make a DTensor, cut as a parameter's home shards are, from this rank's part."""
    shape = torch.Size(spec.whole_shape)
    stride = torch.empty(shape, device="meta").stride()
    return dtensor_of(local, mesh, placements_of(spec), shape=shape, stride=stride)


def check_cut(given: DTensor, key: str, expected: tuple[Placement, ...]) -> None:
    """Check that a DTensor in the place of the parameter `key` is cut as the home shard.

    Raises: FcdpError.
    """
    names, placements = given.device_mesh.mesh_dim_names, tuple(given.placements)
    wanted = (TP, INTRA, INTER)[-len(expected) :]
    if names != wanted or placements != expected:
        raise FcdpError(
            f"parameter {key.partition(':')[2]!r} is now cut as {placements} over mesh {names}, but was "
            f"sharded as {expected} over {wanted}; assign its .data or load a state dict, which "
            "both keep the cut"
        )
