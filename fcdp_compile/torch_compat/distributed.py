"""Process groups and DTensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _dispatch_has_kernel_for_dispatch_key, _distributed_c10d
from torch._ops import OpOverload
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves


def calls_dispatch_of_subclasses() -> bool:
    """Whether torch calls `__torch_dispatch__` of classes derived from DTensor, as it does from 2.12 on."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def all_to_all_of_equals(parts: Tensor, group_name: str) -> Tensor:
    """Send `parts[i]` to the i-th rank of a group and return what the ranks sent, in order; differentiable.

    Dynamo traces it as one op.
    """
    group: Any = group_name
    return all_to_all_single_autograd(parts, None, None, group)


def gloo_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group's Gloo collectives wait for their peers; None without Gloo."""
    return _timeout(_backend(group, "cpu", "gloo"))


def nccl_timeout(group: dist.ProcessGroup) -> timedelta | None:
    """How long a group's NCCL collectives may take; None without NCCL."""
    return _timeout(_backend(group, "cuda", "nccl"))


def _timeout(backend: Any) -> timedelta | None:
    found: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return found


def gloo_context_count(group: dist.ProcessGroup) -> int:
    """The group's sets of connections, one for each network interface that Gloo uses; 0 without Gloo."""
    backend = _backend(group, "cpu", "gloo")
    return 0 if backend is None else len(getattr(backend.options, "_devices", "1"))


def _backend(group: dist.ProcessGroup, device: str, name: str) -> Any:
    """The backend of a group for a device if it has this name, else None.

    Also works for a group that was destroyed.
    """
    try:
        backend: Any
        if hasattr(dist, "get_backend_impl"):  # since torch 2.14
            backend = dist.get_backend_impl(group, torch.device(device))
        else:
            backend = group._get_backend(torch.device(device))
    except RuntimeError:  # the group has none for this device
        return None
    return backend if backend.name() == name else None


def comes_from_peers(error: RuntimeError) -> bool:
    """Whether a call to torch.distributed failed because of other ranks or the network.

    Gloo's errors have no class of their own, but a text (torch 2.11 to 2.15): the place in Gloo's source that
    noticed the failure, or that the connection was closed after a timeout.
    """
    text = str(error)
    return isinstance(error, dist.DistError) or "gloo" in text or "pair closure" in text


@contextmanager
def without_splitting(default: dist.ProcessGroup) -> Iterator[None]:
    """Make new groups in this block connect on first use instead of splitting off the default group.

    torch (2.11 to 2.15) splits them off if the default group is bound to a device that supports this.
    """
    bound: Any = default
    device, bound.bound_device_id = bound.bound_device_id, None
    try:
        yield
    finally:
        bound.bound_device_id = device


def rendezvous_store() -> Any:
    """The store by which the ranks of a job have found each other, over a separate connection."""
    store: Any = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def last_collectives() -> bytes:
    """What torch's flight recorder has of the last collectives, as JSON: NCCL's if torch has NCCL."""
    names = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
    found: bytes = next(
        getattr(_distributed_c10d, n) for n in names if hasattr(_distributed_c10d, n)
    )()
    return found


def takes_plain_tensors() -> bool:
    """Whether DTensor treats plain tensors as replicated (`torch…experimental.implicit_replication`)."""
    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def has_rule(op: OpOverload, args: Sequence[Any]) -> bool:
    """Whether DTensor has a right rule for a call of an op, or takes the op apart; tried on torch 2.13.

    Without a rule of its own, DTensor derives one from the op's decomposition.  The derived rule is wrong
    where the op depends on the number of elements, as elementwise ops never do: the mean of a loss becomes
    the mean of the ranks' means.
    """
    is_over = len(args) > 1 and op._schema.arguments[1].name == "dim"
    # No dimensions stand for all of them, but the rules of reductions leave the tensor cut.
    if (is_over and args[1] == []) or op.overloadpacket in _WRONG_RULES:
        return False
    dispatcher = DTensor._op_dispatcher
    rules = dispatcher.sharding_propagator
    kinds = "op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules"
    tables = dispatcher._custom_op_handlers, *(getattr(rules, kind, {}) for kind in kinds)
    return (
        torch.Tag.pointwise in op.tags
        or op is _aten._local_scalar_dense.default
        or any(op in table for table in tables)
        or _dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


_aten = torch.ops.aten

_WRONG_RULES = {
    # They take any two tensors for cut alike, but an index may have fewer rows than what it indexes.
    *(_aten.gather, _aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_),
    *(_aten.scatter_reduce, _aten.scatter_reduce_),
    # Its results share one mask, so a second lookup fails while the first one's sum is pending.
    _aten.embedding,
    # They refuse rows that are cut over two dimensions of a mesh, and all strides but those that are there.
    *(_aten.convolution, _aten.convolution_backward, _aten.as_strided),
}


def wanted_placements(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[tuple[DTensor, tuple[Placement, ...]]] | None:
    """The arguments that DTensor will redistribute before it runs an op, and their new placements.

    None if DTensor's rule refuses these arguments.
    """
    dispatcher = DTensor._op_dispatcher
    call = dispatcher.unwrap_to_op_info(op, tuple(args), dict(kwargs))
    assert call.schema is not None, op
    try:
        sharding: Any = dispatcher.sharding_propagator.propagate_op_sharding(call.schema)
    except NotImplementedError:
        return []  # DTensor runs this op in another way, or will raise this error
    except Exception:  # torch's rules raise errors of many classes
        return None
    if not sharding.needs_redistribute or sharding.redistribute_schema is None:
        return []
    given, wanted = args, sharding.redistribute_schema.args_schema
    if call.args_tree_spec is not None:
        given, wanted = tree_leaves(given), tuple(tree_leaves(wanted))
    return [
        (tensor, spec.placements)
        for tensor, spec in zip(given, wanted, strict=False)
        if isinstance(tensor, DTensor)
        and isinstance(spec, DTensorSpec)
        and tensor.placements != spec.placements
    ]


def dtensor_of(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    shape: Sequence[int],
    stride: Sequence[int],
) -> DTensor:
    """A DTensor of this rank's part; unlike `DTensor.from_local`, the part stays on its device.

    shape, stride: of the whole tensor.  Autograd does not follow it.
    """
    whole = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=whole)
    return DTensor(local.detach(), spec, requires_grad=False)


def reshape_wrapper(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Give a tensor that is a wrapper the shape that an op such as `squeeze_` gives it, and nothing else."""
    return_and_correct_aliasing(op, args, dict(kwargs), args[0])


def start_fake_group(ranks: int) -> None:
    """Initialise torch.distributed as the first of several ranks that do not exist."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
