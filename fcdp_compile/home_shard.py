"""The parameter that `shard` leaves in a model: a DTensor that holds this rank's home shard.

[Note: released shards]
The device memory of a frozen home shard can be given back while the host has its values (`release`).  The
shard's tensor object stays, for graphs and guards to hold, but has a storage of no bytes, and reading that
crashes.  So every way to the values goes through `bring_back`, which reads them from the host again: ops
(`__torch_dispatch__`), `to_local` and its like, `.data`, the attribute `_local_tensor`.

One reader must not bring anything back: Dynamo's guards look at `_local_tensor` before every call of a
compiled model, and AOTAutograd passes it on to the graph, which leaves it alone.  While the model is being
called (`Calls.inside`) the attribute is therefore given as it is, and a graph that does read a shard asks
for it with `bring_back_inputs`.

Whoever holds an alias of a shard keeps it from being released: storages are counted.  An object that was
handed out is replaced by an alias of it here, so that it counts too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fcdp_compile.derived import Sharded, is_plain
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.home_tensor import HomeTensor
from fcdp_compile.layout import ParamLayout
from fcdp_compile.strategy import Scope
from fcdp_compile.torch_compat import storage_id, storage_uses, without_modes

KEY = "_fcdp_key"
"""The attribute of a sharded parameter that `key_of` reads."""

REPLACED = "_fcdp_replaced"
"""The attribute of what was a parameter before `shard`: its name."""


class Calls:
    """Whether a model is being called, compiled or not; shared by all its shards."""

    __slots__ = ("inside",)

    def __init__(self) -> None:
        self.inside = False


def _meeting(name: str) -> Callable[[HomeShard, Any], Any]:
    """An operator of tensors that lets a home shard meet whole tensors (`derived`)."""
    operator: Callable[[Tensor, Any], Any] = getattr(Tensor, name)

    def operate(self: HomeShard, other: Any) -> Any:
        is_met = is_plain(other) and not torch.compiler.is_compiling()
        return operator(self.view_as(self) if is_met else self, other)

    return operate


class HomeShard(Sharded):
    """A DTensor parameter whose `.data` can be assigned and whose memory can be released.

    A plain DTensor takes `p.data = other` without complaint and keeps its old values, silently (torch 2.11
    to 2.13: assignment swaps the outer tensor, which has no storage).  Here `other` may be a DTensor of any
    placements and mesh or a whole tensor of the full shape, of which this rank keeps its part; so may that
    of `p.copy_(other)`.
    """

    # Of the model that the shard is a parameter of; None for gradients and for what tracing makes.
    _calls: Calls | None = None
    # The key of the parameter that the shard is of (`key_of`); None as above.
    _fcdp_key: str | None = None
    # While released: who has the values, and how to get them.
    _away: _Away | None = None
    # Makes isinstance(shard, nn.Parameter) true for a tensor subclass.
    _is_param = False

    @staticmethod
    def of(
        local: Tensor,
        layout: ParamLayout,
        mesh: DeviceMesh,
        *,
        requires_grad: bool,
        home: Scope = Scope.GLOBAL,
        calls: Calls | None = None,
        key: str | None = None,
    ) -> HomeShard:
        """Wrap this rank's local shard as an `nn.Parameter` of the full shape."""
        shape = torch.Size(layout.shape)
        stride = torch.empty(shape, device="meta").stride()
        dtensor = DTensor.from_local(
            local, mesh, placements_of(layout, home), run_check=False, shape=shape, stride=stride
        )
        shard = HomeShard._like(dtensor)
        shard.requires_grad_(requires_grad)
        shard._calls = calls
        shard._fcdp_key = key
        return shard

    @staticmethod
    def _like(dtensor: DTensor) -> HomeShard:
        # `from_local` leaves a view, which would hold another tensor of the same memory.
        local = dtensor._local_tensor
        shard: HomeShard = HomeShard(  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types
            local.detach() if type(local) is Tensor else local,
            dtensor._spec,
            requires_grad=dtensor.requires_grad,
        )
        shard._is_param = True
        return shard

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> HomeShard:
        # AOTAutograd rebuilds its inputs through this and then insists on the very class it was given.
        return HomeShard._like(
            DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        )

    @property
    def data(self) -> Tensor:
        """The values without autograd, sharing memory; a home shard too, as it may be copied to."""
        self.expose()
        return HomeShard(self.held.data, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types

    @data.setter
    def data(self, other: Tensor) -> None:
        if tuple(other.shape) != tuple(self.shape) or other.dtype != self.dtype:
            raise ArgumentError(
                f"cannot assign {other.dtype} {tuple(other.shape)} to the .data of a sharded parameter of "
                f"{self.dtype} {tuple(self.shape)}; assign a tensor of the same dtype and full shape"
            )
        if isinstance(other, DTensor) and other.device_mesh != self.device_mesh:
            # The same placements on another mesh, such as ("inter", "intra"), are other rows.
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
        """The values as autograd's constant, sharing memory: what `state_dict` holds."""
        self.expose()
        return HomeShard(self.held.detach(), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types

    # --- whole tensors ------------------------------------------------------------------------------------

    def module_load(self, other: Tensor, assign: bool = False) -> HomeShard:
        """This home shard again, for `load_state_dict` where `torch.__future__` makes it swap tensors."""
        self.copy_(other)
        loaded = self.detach()
        vars(loaded).update(vars(self))
        loaded.seal = None
        return loaded

    def storage(self) -> NoReturn:
        """Refuse: safetensors, for one, looks for the bytes of a whole tensor there."""
        raise FcdpError(
            f"a sharded parameter of shape {tuple(self.shape)} has no storage of its whole values, so this "
            "rank alone cannot write the state dict; let every rank call "
            "fcdp_compile.save_pretrained(model, folder) or fcdp_compile.save, or write it within a block of "
            "fcdp_compile.gathered(model)"
        )

    @property
    def grad(self) -> Tensor | None:
        """The gradient, whose ops communicate as the parameter's do."""
        grad: Tensor | None = HomeTensor.adopt(_GRAD.__get__(self))
        return grad

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        if grad is not None and isinstance(old := _GRAD.__get__(self), HomeTensor):
            old.expose()  # the new one may be told from it
        _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    # --- releasing: [Note: released shards] ---------------------------------------------------------------

    @property
    def held(self) -> Tensor:
        """The local shard, which may have no memory now: for those who do not read it."""
        held: Tensor = _SLOT.__get__(self)
        return held

    @property
    def released_by(self) -> object | None:
        """What `release` was told; None if the shard is on its device."""
        return None if self._away is None else self._away.keeper

    def release(self, keeper: object, values: Callable[[], Tensor]) -> bool:
        """Give the shard's device memory back; returns whether that was possible.

        values: gives the shard again, of its shape and dtype, on any device.
        It is impossible while somebody else shares the memory, who would be left with nothing.
        """
        held = self.held
        if self._away is not None or not held.numel() or not _is_own(held):
            return False
        self._away = _Away(keeper, values, held.untyped_storage().nbytes())
        held.untyped_storage().resize_(0)
        _released[storage_id(held)] = self
        return True

    def values(self) -> Tensor:
        """This rank's values without autograd, wherever they are; a released shard stays released."""
        if self._away is None:
            return self.held.detach()
        with without_modes():
            return self._away.values()

    def bring_back(self) -> None:
        """Give a released shard its memory and values again; nothing to do for any other."""
        if (away := self._away) is None:
            return
        held = self.held
        # Nothing has changed: neither version counters nor gradients may notice.
        with without_modes():
            values = away.values()
            held.untyped_storage().resize_(away.size_bytes)
            held.data.copy_(values)
        self._away = None
        _released.pop(storage_id(held), None)

    def peek(self) -> Tensor:
        """The local shard's values to read now: on the host if it is released, and it stays so."""
        if (away := self._away) is None:
            return self.held
        with without_modes():
            return away.values()

    def _given_local(self) -> Tensor:
        if self._calls is not None and self._calls.inside:
            return self.held
        self.expose()
        held = self.held
        if self._calls is None:
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
        """As HomeTensor's; a released shard is brought back."""
        self.bring_back()
        super().expose()

    def __tensor_flatten__(self) -> Any:
        # A compiler is about to look at the storage.
        self.bring_back()
        return super().__tensor_flatten__()  # type: ignore[no-untyped-call]  # DTensor's has no types

    def present(self) -> Tensor:
        """The local shard; a released one is brought back."""
        self.bring_back()
        return self.held

    def to_local(self, **options: Any) -> Tensor:
        """As DTensor's."""
        self.expose()
        return super().to_local(**options)

    def to_gather(self) -> Tensor:
        """As `to_local`, within a call of the model, for an op that reads it."""
        self.bring_back()
        return super().to_local()

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """As DTensor's."""
        self.bring_back()
        return super().redistribute(*args, **options)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """As `Sharded`'s."""
        self.bring_back()
        return super().full_tensor(grad_placements=grad_placements)

    # Python asks these before it asks the plain tensor on the other side; torch's functions it does not ask.
    __add__, __radd__ = _meeting("__add__"), _meeting("__radd__")
    __sub__, __rsub__ = _meeting("__sub__"), _meeting("__rsub__")
    __mul__, __rmul__ = _meeting("__mul__"), _meeting("__rmul__")
    __truediv__, __rtruediv__ = _meeting("__truediv__"), _meeting("__rtruediv__")
    __pow__, __rpow__ = _meeting("__pow__"), _meeting("__rpow__")
    __matmul__, __rmatmul__ = _meeting("__matmul__"), _meeting("__rmatmul__")

    def __repr__(  # type: ignore[override]  # DTensor's is typed without Tensor's options
        self, *args: Any, **options: Any
    ) -> str:
        # DTensor's looks at `_local_tensor`, perhaps while the model is being called.
        self.bring_back()
        return str(super().__repr__(*args, **options))  # type: ignore[no-untyped-call]  # DTensor's has no types

    def __deepcopy__(self, memo: dict[int, Any]) -> HomeShard:
        if id(self) not in memo:
            self.bring_back()
            copy = HomeShard(self.held.clone(), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # DTensor.__new__ has no types
            copy.requires_grad_(self.requires_grad)
            copy._is_param = self._is_param
            memo[id(self)] = copy
        found: HomeShard = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As a plain DTensor, which `torch.load` can read.
        self.bring_back()
        return super().__reduce_ex__(protocol)


class _Away:
    """Of a released shard: who has its values, how to get them, the bytes that its storage had."""

    __slots__ = ("keeper", "size_bytes", "values")

    def __init__(self, keeper: object, values: Callable[[], Tensor], size_bytes: int) -> None:
        self.keeper = keeper
        self.values = values
        self.size_bytes = size_bytes


_SLOT: Any = DTensor.__dict__["_local_tensor"]
_GRAD: Any = DTensor.grad  # a descriptor, which torch's types do not tell

_released: weakref.WeakValueDictionary[int, HomeShard] = weakref.WeakValueDictionary()
"""Every released shard of the process by its storage, which lives as long as it does."""


def key_of(tensor: object) -> str | None:
    """The key of a sharded parameter, also in a single process, where it is whole; None for anything else."""
    key: str | None = getattr(tensor, KEY, None)
    return key


def bring_back_inputs(values: Iterable[Any]) -> None:
    """Bring back the released shards among the tensors that a graph is about to read."""
    if _released:
        for value in values:
            if type(value) is Tensor and (shard := _released.get(storage_id(value))) is not None:
                shard.bring_back()


def _is_own(held: Tensor) -> bool:
    """Whether a tensor has its memory for itself, all of it."""
    # First: while `storage` is held here, it counts as one more use.
    if held.is_inference() or storage_uses(held) != 1:
        return False
    storage = held.untyped_storage()
    # A storage is not resizable once numpy has seen it.
    return storage.resizable() and storage.nbytes() == held.nbytes


def rows_of(whole: Tensor, layout: ParamLayout, node: int, place: int) -> Tensor:
    """The rows of a whole parameter that are the home shard of the rank at a place of a node; a view."""
    if layout.dim is None:
        return whole
    rows = layout.local_shape(node, place)[layout.dim]
    return whole.narrow(layout.dim, layout.local_start(node, place), rows)


def placements_of(layout: ParamLayout, home: Scope) -> tuple[Shard | Replicate, Shard | Replicate]:
    """DTensor placements on the ("intra", "inter") mesh (`layout`, [Note: chunk order])."""
    if layout.dim is None or home is Scope.NONE:
        return (Replicate(), Replicate())
    return (Shard(layout.dim), Shard(layout.dim) if home is Scope.GLOBAL else Replicate())


def check_cut(given: DTensor, key: str, expected: tuple[Shard | Replicate, ...]) -> None:
    """Check that a DTensor in the place of the parameter `key` is cut as the home shard.

    Raises: FcdpError.
    """
    names, placements = given.device_mesh.mesh_dim_names, tuple(given.placements)
    if names != ("intra", "inter") or placements != expected:
        raise FcdpError(
            f"parameter {key.partition(':')[2]!r} is now cut as {placements} over mesh {names}, but was "
            f"sharded as {expected} over ('intra', 'inter'); assign its .data or load a state dict, which "
            "both keep the cut"
        )
