"""The DTensor class of home shards, their gradients and optimizer states: fewer and larger collectives.

A plain DTensor on the two-dimensional home mesh communicates once for each dimension, and a long warning says
that this is slow.  A mesh of one dimension is no alternative: torch 2.13 then silently gathers the wrong rows
of uneven shards.  So a `HomeTensor` is a DTensor that

* reduces a pending value (a norm, a sum) in one all-reduce over all ranks, once;
* gathers rows over one mesh dimension after the other (`home_collectives`).  One flat all-gather would send
  1.5 times as many bytes between two nodes of two ranks;
* runs elementwise ops, such as an optimizer's, on the local tensors (`local_ops`).

Results of ops on HomeTensors are HomeTensors.

[Note: ways to run an op]
An op on sharded tensors runs in the first of these ways that applies:

1. A detach of a late gradient stays late.  Every other op breaks the seals of what it may write to.
2. GradScaler's op has its own rule.
3. An op that changes a tensor's shape in place has its own rule (`_reshape_in_place`).
4. The op needs the local shards alone (`run_locally`).
5. The op draws random numbers, takes elements out, or meets plain tensors: it runs on whole tensors.
6. DTensor has no rule for it, or its rule fails on shards like these: it runs on whole tensors.
7. DTensor's rule.

A write to a copy that only looks like a view is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from fcdp_compile.core.params.home_collectives import (
    are_pending,
    cuts_rows,
    device_of_collectives,
    everywhere,
    greatest_of_all_ranks,
    leaves_ranks_empty,
    naming_ranks_lost_in,
    put_on,
    redistributed,
    reduced,
    steps_between,
)
from fcdp_compile.core.params.late import LateTensor
from fcdp_compile.core.params.local_ops import (
    RESHAPES,
    VIEWS,
    communicates_never,
    fitted,
    flat,
    has_home_node,
    is_in_place,
    loses_home_nodes,
    mapped,
    run_locally,
)
from fcdp_compile.core.params.seals import Seal
from fcdp_compile.core.params.whole_ops import (
    draws,
    meets_plain,
    reached,
    refuse_collective,
    returns_views,
    run_whole,
    takes_out,
    written_by,
)
from fcdp_compile.core.ranks.inner_mesh import all_ranks_of
from fcdp_compile.errors import FcdpError
from fcdp_compile.torch_compat import tree_map_only
from fcdp_compile.torch_compat.autograd import without_torch_function
from fcdp_compile.torch_compat.compilers import skip_frames_below
from fcdp_compile.torch_compat.distributed import (
    has_rule,
    reshape_wrapper,
    takes_plain_tensors,
    wanted_placements,
)
from fcdp_compile.torch_compat.tensors import storage_id

V = TypeVar("V")


class HomeTensor(DTensor):
    """A DTensor on the home mesh; see above.

    seal: the seal of its memory (`seals`, [Note: seals]); None if the values were never checked, or if all
    change.
    """

    __slots__ = ()

    seal: Seal | None = None

    @staticmethod
    def adopt(value: V) -> V:
        """Turn a DTensor on a home mesh into a HomeTensor in place; other values stay as they are."""
        found: Any = value  # mypy narrows no type variable
        if type(found) is not DTensor or all_ranks_of(found.device_mesh) is None:
            return value
        if type(found._local_tensor) in (Tensor, LateTensor) or has_home_node(found):
            found.__class__ = HomeTensor
        return value

    @staticmethod
    def on_home(local: Tensor, spec: Any) -> DTensor:
        """Make a HomeTensor of this rank's part.  spec: DTensor's, of a tensor on a home mesh."""
        # Calling __new__ skips DTensor.__init__, which does nothing and takes 5 us.
        return HomeTensor.adopt(DTensor.__new__(DTensor, local, spec, requires_grad=False))

    @classmethod
    def __tensor_unflatten__(cls, *parts: Any) -> DTensor:
        # AOTAutograd rebuilds its inputs through this and then insists on the very class it was given.
        made: DTensor = DTensor.__tensor_unflatten__(*parts)
        made.__class__ = cls
        return made

    # After a graph break Dynamo would compile the Python code of ops, which it cannot trace.
    @classmethod
    @skip_frames_below
    def __torch_dispatch__(  # type: ignore[override]  # Tensor's is typed as an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def present(self) -> Tensor:
        """The local tensor, with its memory and values, for reading."""
        return _held(self)

    @property
    def is_late(self) -> bool:
        """Whether the values are still on their way."""
        held = _SLOT.__get__(self)
        return type(held) is LateTensor and held.is_late

    def settle(self) -> None:
        """Replace a late local tensor by the tensor with its values."""
        if type(held := _SLOT.__get__(self)) is LateTensor:
            _SLOT.__set__(self, held.present())

    def expose(self) -> None:
        """Break the seal, because a caller is about to get access to the memory and may write to it."""
        if self.seal is not None:
            self.seal.break_for(self.present())

    def _given_local(self) -> Tensor:
        self.expose()
        return _held(self)

    def _set_local(self, local: Tensor) -> None:
        self.seal = None
        _SLOT.__set__(self, local)

    _local_tensor = property(_given_local, _set_local)

    @skip_frames_below
    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        """Like DTensor's, with fewer collectives or fewer bytes between nodes."""
        found: DTensor = self
        is_put = False
        with naming_ranks_lost_in(self.device_mesh, held := _held(self)):
            if placements is not None and device_mesh in (None, self.device_mesh):
                if are_pending(self.placements) and all(
                    isinstance(p, Replicate) for p in placements
                ):
                    _settle([self])
                is_recorded = self.requires_grad and torch.is_grad_enabled()
                if type(held) is Tensor and not is_recorded and not options:
                    return HomeTensor.adopt(redistributed(_plain(self), placements))
                if is_put := (
                    type(held) is not LateTensor and tuple(placements) != tuple(self.placements)
                ):
                    found = put_on(self, device_of_collectives(self.device_mesh))
                for step in steps_between(self.placements, placements):
                    found = DTensor.redistribute(found, placements=step, **options)
            found = DTensor.redistribute(found, device_mesh, placements, **options)
            if is_put:
                found = put_on(found, held.device)
        return HomeTensor.adopt(found)

    def _stable_hash_for_caching(self) -> str:  # DTensor's is equal for ranks with other rows
        return f"{super()._stable_hash_for_caching()} {tuple(_SLOT.__get__(self).shape)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as a plain DTensor, so that reading it does not need fcdp.
        self.expose()  # another process may share the memory
        return _plain(self).__reduce_ex__(protocol)

    @skip_frames_below
    def __setitem__(self, index: Any, value: Any) -> None:
        """Assign to elements of the whole tensor, on all ranks alike; this rank keeps its part.

        It takes memory for the whole tensor; nothing is communicated unless `value` or `index` is sharded.
        """
        has_rows = isinstance(value, Tensor) and value.dim() > 0
        if isinstance(index, DTensor) and not has_rows:  # a mask that is cut like this tensor
            return super().__setitem__(index, value)
        if torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (self, value)
        ):
            raise FcdpError(
                f"elements of a sharded tensor of shape {tuple(self.shape)} are assigned where autograd "
                "records it; assign them within torch.no_grad(), or compute with fcdp_compile.full(parameter)"
            )
        index, value = tree_map_only(DTensor, DTensor.full_tensor, (index, value))
        held = self.present()
        changes = torch.zeros(self.shape, dtype=torch.bool, device=held.device)
        values = torch.empty(self.shape, dtype=held.dtype, device=held.device)
        changes[index], values[index] = True, value
        with without_torch_function():
            self.copy_(torch.where(changes, values, self))
        return None

    def tolist(self) -> Any:
        """The whole tensor as nested lists; every rank must call it."""
        detached: Any = self.detach()  # typed as a Tensor
        return detached.full_tensor().tolist()

    def __format__(self, spec: str) -> str:
        """Format a single number, such as the norm of all gradients; communicates nothing."""
        if self.dim() or not spec:
            return object.__format__(self, spec)
        if not all(p.is_replicate() for p in self.placements):
            raise FcdpError(
                f"format {spec!r} of a sharded value that is not reduced yet; call item() on every rank"
            )
        return format(self.present().item(), spec)

    def numpy(self, *, force: bool = False) -> Any:
        raise FcdpError(
            f"numpy() of a sharded tensor of shape {tuple(self.shape)}: this rank has only a part; call "
            "full_tensor().detach().cpu().numpy() on every rank"
        )


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op on sharded tensors: [Note: ways to run an op]."""
    if func is _aten.detach.default and type(late := _SLOT.__get__(args[0])) is LateTensor:
        return HomeTensor.on_home(late.detach(), args[0]._spec)
    _expose(func, args, kwargs)
    if func is _aten._amp_foreach_non_finite_check_and_unscale_.default:
        return _unscale(func, *args)
    if func._schema.is_mutable and any(
        getattr(t, _COPY, False) for t in written_by(func, args, kwargs)
    ):
        raise FcdpError(
            f"a view of a sharded tensor that spans ranks is a copy, and the values that {func} writes "
            "to it would be lost; assign to the elements of the tensor itself (tensor[rows] = values), or "
            "write to the parameter within a block of fcdp_compile.gathered(model)"
        )
    if func in RESHAPES:
        return _reshape_in_place(func, args, kwargs)
    source = args[0] if args else None  # taken before its rows are gathered
    done = run_locally(func, args, kwargs, _present)
    if done is not NotImplemented:
        return _adopted(done)
    tensors: list[DTensor] = []
    mapped(tensors.append, (args, list(kwargs.values())))
    is_traced = any(type(_held(t)) is not Tensor for t in tensors)
    loses = loses_home_nodes(func, args, tensors)
    if is_traced and loses and func is not _aten.detach.default:
        raise FcdpError(
            f"torch.compile traces {func} on a matrix with a home node, for which torch has no rule; compute "
            "it outside of torch.compile, or from fcdp_compile.full of the parameter"
        )
    if draws(func) or takes_out(func):
        return _run_whole(func, args, kwargs)
    if not is_traced:
        refuse_collective(func)
        if not takes_plain_tensors() and meets_plain(func, args, kwargs, tensors[0]):
            return _run_whole(func, args, kwargs, cuts_results=False)
    # DTensor's rule of these views never ends on a tensor without elements.
    is_void = func in VIEWS and not is_traced and args[0].numel() == 0
    if is_void or loses or not has_rule(func, args):
        return _run_whole(func, args, kwargs)
    if not (is_traced or communicates_never(func, tensors)):
        # On a rank without elements an op may fail that others run, such as the largest of no elements.
        is_empty = not returns_views(func) and any(map(leaves_ranks_empty, tensors))
        prepared = None if is_empty else _prepared(func, args, kwargs)
        if prepared is None:
            return _run_whole(func, args, kwargs)
        args = prepared
    found = _run_by_dtensor(func, args, kwargs, is_traced=is_traced)
    if not is_traced:
        _mark_copies(func, source, found := _adopted(found))
    elif all(type(t) is HomeTensor for t in tensors):
        # Hooks of a compiled backward get gradients of the class that they have in the trace.
        found = tree_map_only(DTensor, as_home_tensor, found)
    return found


def as_home_tensor(dtensor: DTensor) -> DTensor:
    """Change the class of this DTensor object to `HomeTensor`, whatever mesh it is on."""
    dtensor.__class__ = HomeTensor
    return dtensor


def _reshape_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that gives a sharded tensor another shape; DTensor leaves it the old shape or placements.

    Raises: FcdpError for a parameter, whose shape the layout of the home shards has.
    """
    tensor = args[0]
    if isinstance(tensor, nn.Parameter):
        raise FcdpError(
            f"{func} would change the shape of a sharded parameter, {tuple(tensor.shape)}; change shapes "
            "before fcdp_compile.shard, or compute with a view (parameter.unsqueeze(0))"
        )
    found = _run(RESHAPES[func], args, kwargs)
    reshape_wrapper(func, args, kwargs)
    tensor._spec = found._spec
    tensor._set_local(_SLOT.__get__(found))
    return tensor


def _run_by_dtensor(func: Any, args: Any, kwargs: Any, *, is_traced: bool) -> Any:
    """Run an op by DTensor's rule for it, or on whole tensors if there is no rule.

    An op that writes to an argument returns the argument.
    """
    given: list[tuple[DTensor, HomeTensor]] = []

    def plain(tensor: DTensor) -> DTensor:
        if not isinstance(tensor, HomeTensor):
            return tensor
        local = fitted(func, args, tensor.present(), tensor.stride())
        given.append((_plain(tensor, local), tensor))
        return given[-1][0]

    values = dict(zip(kwargs, mapped(plain, kwargs.values()), strict=True))
    try:
        found = func(*mapped(plain, args), **values)
    except NotImplementedError:
        # DTensor has no rule for this elementwise op, or for a part of this composite op.
        if is_traced:
            raise
        return _run_whole(func, args, kwargs)
    return next((mine for made, mine in given if made is found), found)


def _run_whole(func: Any, args: Any, kwargs: Any, *, cuts_results: bool = True) -> Any:
    _settle(t for t in flat((*args, *kwargs.values())) if _is_pending(t))
    found = run_whole(func, args, kwargs, _gathered, _present, cuts_results=cuts_results)
    _mark_copies(func, args[0] if args else None, found := _adopted(found))
    return found


def _gathered(tensor: DTensor) -> Tensor:
    return _held(_whole(tensor))


def _expose(func: Any, args: Any, kwargs: Any) -> None:
    """Break the seals on the tensors that an op writes to or returns views of."""
    values = (args[at] if at < len(args) else kwargs.get(name) for at, name in reached(func))
    for tensor in flat(values):
        if isinstance(tensor, HomeTensor):
            tensor.expose()


def _mark_copies(func: Any, source: Any, found: Any) -> None:
    """Mark results that torch takes for views of a tensor but that are copies, such as gathered rows."""
    if not (returns_views(func) and isinstance(source, DTensor)):
        return
    is_copy, held = getattr(source, _COPY, False), storage_id(_held(source))
    for view in flat([found]):
        if isinstance(view, HomeTensor) and (is_copy or storage_id(_held(view)) != held):
            setattr(view, _COPY, True)


def _prepared(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    """Reduce or gather the arguments of an op in one collective over all ranks.

    Returns None if DTensor's rule refuses them, or would write to a gathered copy of an argument.
    DTensor would use one collective for each mesh dimension.
    """
    if func in VIEWS and cuts_rows(args[0], args[1]):
        args = [_whole(args[0]), *args[1:]]
    is_item = func.overloadpacket is _aten._local_scalar_dense
    if is_in_place(func) or is_item:
        # DTensor cannot write to a partial value, and its `item` returns a partial value unreduced.
        given: list[DTensor] = []
        mapped(given.append, args)
        _settle(t for t in given if _is_pending(t))
        if is_item:  # if the tensor is cut, only one rank has the element
            args = [_whole(args[0])]
    change: dict[int, DTensor] = {}
    pending: list[HomeTensor] = []
    wanted = wanted_placements(func, args, kwargs)
    written = {id(tensor) for tensor in written_by(func, args, kwargs)}
    if wanted is None or any(id(tensor) in written for tensor, _ in wanted):
        return None
    for tensor, placements in wanted:
        if isinstance(tensor, HomeTensor) and not any(p.is_partial() for p in placements):
            if _is_pending(tensor):
                pending.append(tensor)
            else:
                change[id(tensor)] = HomeTensor.adopt(redistributed(_plain(tensor), placements))
    _settle(pending)
    return mapped(lambda tensor: change.get(id(tensor), tensor), args)


def _is_pending(tensor: object) -> TypeGuard[HomeTensor]:
    """Whether a value is still to be reduced over ranks, of all of its elements or of this rank's."""
    return isinstance(tensor, HomeTensor) and any(p.is_partial() for p in tensor.placements)


def _settle(tensors: Iterable[HomeTensor]) -> None:
    """Make pending values whole on all ranks, values of one kind together; each tensor keeps its result."""
    kinds: dict[tuple[tuple[Placement, ...], torch.dtype], dict[int, HomeTensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.placements, tensor.dtype), {})[id(tensor)] = tensor
    for (placements, _), by_id in kinds.items():
        alike = list(by_id.values())
        mesh = alike[0].device_mesh
        if are_pending(placements):
            results = reduced([_held(t) for t in alike], mesh, placements)
        else:  # parts of them are on other ranks, of "tp" or of the mesh
            results = [_held(_whole(t)) for t in alike]
        for tensor, whole in zip(alike, results, strict=True):
            made = DTensor.from_local(whole, mesh, everywhere(mesh), run_check=False)
            tensor._spec = made._spec
            tensor._set_local(whole)


def _whole(tensor: DTensor) -> DTensor:
    return HomeTensor.adopt(redistributed(_plain(tensor), everywhere(tensor.device_mesh)))


def _unscale(func: Any, grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients for a GradScaler; every rank learns if any rank has a value that is not finite."""
    func(mapped(_present, grads), found_inf, inv_scale)
    torch.autograd.graph.increment_version(grads)  # which torch does not do for this op
    sharded = next(g for g in grads if isinstance(g, DTensor))
    greatest_of_all_ranks(found_inf, sharded.device_mesh)


def _adopted(found: Any) -> Any:
    if isinstance(found, (list, tuple)):
        return type(found)(HomeTensor.adopt(value) for value in found)
    return HomeTensor.adopt(found)


def _held(tensor: DTensor) -> Tensor:
    held: Tensor = _SLOT.__get__(tensor)
    return held.present() if type(held) is LateTensor else held


def _present(tensor: DTensor) -> Tensor:
    if type(tensor) in (DTensor, HomeTensor):
        return _held(tensor)
    assert isinstance(tensor, HomeTensor), type(tensor)
    return tensor.present()


def _plain(tensor: DTensor, local: Tensor | None = None) -> DTensor:
    local = _present(tensor) if local is None else local
    return DTensor.__new__(DTensor, local, tensor._spec, requires_grad=tensor.requires_grad)


_SLOT: Any = DTensor.__dict__["_local_tensor"]

_aten = torch.ops.aten
_COPY = "_fcdp_copy"
"""The attribute of a copy that torch takes for a view of a sharded tensor; it is read-only."""
