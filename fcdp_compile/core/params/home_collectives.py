"""Reduce and gather values on the home mesh in fewer and larger collectives than DTensor's own.

    pending values    all values of one kind are reduced in one all-reduce over all ranks
    rows              are gathered between nodes first, where each row crosses once, then within the node

`AllRanks.sent_bytes` counts the bytes that a node sends to others.  Tensors and DTensors here are plain; only
`put_on` takes others, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fcdp_compile.core.params.layout import chunk_rows, rows_of_part
from fcdp_compile.core.ranks.inner_mesh import all_ranks_of
from fcdp_compile.core.ranks.lost_ranks import naming_lost_ranks
from fcdp_compile.devices import are_on_stream
from fcdp_compile.torch_compat.distributed import dtensor_of
from fcdp_compile.torch_compat.placements import NodeShard, matrices_in


def everywhere(mesh: DeviceMesh) -> list[Placement]:
    """The placements of a tensor that is whole on every rank."""
    return [Replicate()] * mesh.ndim


def are_pending(placements: Sequence[Placement]) -> bool:
    """Whether a value is still to be reduced over ranks: each rank holds a partial value of every element."""
    # Not `is_shard`, which is false for torch's strided shard.
    is_cut = not all(p.is_replicate() or p.is_partial() for p in placements)
    return any(p.is_partial() for p in placements) and not is_cut


def device_of_collectives(mesh: DeviceMesh) -> torch.device:
    """The device, without an index, whose tensors the mesh's groups take: the CPU if one of them is Gloo's.

    DTensor gathers coalesced, and then Gloo takes the memory of a GPU for the host's, which ends the process
    (torch 2.11 and 2.13, pytorch issue 152645).
    """
    kind = mesh.device_type
    is_own = kind == "cpu" or all(are_on_stream(kind, group) for group in mesh.get_all_groups())
    return torch.device(kind if is_own else "cpu")


def naming_ranks_lost_in(mesh: DeviceMesh, local: Tensor) -> AbstractContextManager[None]:
    """Raise LostRankError if a collective in this block fails because a rank is missing; no-op in tracing."""
    every = all_ranks_of(mesh)
    if every is None or type(local) is not Tensor:
        return nullcontext()
    doing = "a sharded tensor's own collective, as in clip_grad_norm_ or full_tensor"
    return naming_lost_ranks(every.mesh.get_group(), doing)


def reduced(
    parts: Sequence[Tensor], mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[Tensor]:
    """Reduce this rank's parts of pending values with those of all ranks, in one all-reduce."""
    reducing = mesh
    if (every := all_ranks_of(mesh)) is not None:
        nodes = mesh.size(mesh.ndim - 1)
        every.sent_bytes += sum(2 * t.numel() * t.itemsize for t in parts) * (nodes - 1) // nodes
        flat, rest = every.mesh, placements
        if mesh.ndim > 2 and placements[0].is_replicate():  # every rank of "tp" has the value
            flat, rest = every.data, placements[1:]
        if len(set(rest)) == 1:
            reducing, placements = flat, rest[:1]
    packed = torch.cat([t.detach().reshape(-1) for t in parts])
    pending = _pending(packed, reducing, placements)
    with naming_ranks_lost_in(mesh, parts[0]):
        done = pending.redistribute(placements=everywhere(reducing)).to_local()
    found = done.split([t.numel() for t in parts])
    return [
        torch.empty_like(t).copy_(part.view(t.shape)) for t, part in zip(parts, found, strict=True)
    ]


def _pending(part: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A value to be reduced over the ranks of a mesh.  part: this rank's part."""
    pending = dtensor_of(part, mesh, placements, shape=part.shape, stride=part.stride())
    return put_on(pending, device_of_collectives(mesh))


def greatest_of_all_ranks(value: Tensor, mesh: DeviceMesh) -> None:
    """Replace this tensor on every rank by the elementwise maximum over all ranks."""
    if (every := all_ranks_of(mesh)) is not None:
        here = _pending(value, every.mesh, [Partial("max")])
        with naming_ranks_lost_in(mesh, value):
            value.copy_(here.redistribute(placements=[Replicate()]).to_local())


def steps_between(
    placements: Sequence[Placement], wanted: Sequence[Placement]
) -> list[list[Placement]]:
    """The intermediate placements for gathering rows over several mesh dimensions, last dimension first."""
    gathered = [
        i
        for i, (now, then) in enumerate(zip(placements, wanted, strict=True))
        if now.is_shard() and then.is_replicate()
    ]
    between = list(placements)
    steps = []
    for i in reversed(gathered[1:]):
        between[i] = Replicate()
        steps.append(list(between))
    return steps


def redistributed(tensor: DTensor, wanted: Sequence[Placement]) -> DTensor:
    """Change the placements of a plain DTensor that autograd does not follow; the result is on its device.

    If nothing changes, it is the same memory.
    """
    if tuple(wanted) == tuple(tensor.placements):
        return tensor
    mesh, device = tensor.device_mesh, tensor._local_tensor.device
    inter = mesh.ndim - 1
    # Collectives run on one kind of device; a tensor in other memory is copied there and back.
    tensor = put_on(tensor, device_of_collectives(mesh))
    for step in [*steps_between(tensor.placements, wanted), wanted]:
        now, then = tensor.placements[inter], step[inter]
        if (every := all_ranks_of(mesh)) is not None and now.is_shard() and now != then:
            sent = tensor.numel() * tensor.itemsize * (mesh.size(inter) - 1)
            every.sent_bytes += sent // mesh.size(inter)
        tensor = moved(tensor, step)
    return put_on(tensor, device)


def put_on(tensor: DTensor, device: torch.device) -> DTensor:
    """The DTensor with this rank's part in a device's memory; autograd follows it.

    A device without an index stands for all of its kind.
    """
    here = tensor._local_tensor.device
    if here == device or (device.index is None and here.type == device.type):
        return tensor
    put: DTensor = _PutOn.apply(tensor, device)  # type: ignore[no-untyped-call]
    return put


class _PutOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, device: torch.device) -> DTensor:
        ctx.before = tensor._local_tensor.device
        return DTensor(tensor._local_tensor.to(device), tensor._spec, requires_grad=False)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor) -> tuple[DTensor, None]:
        return put_on(grads[0], ctx.before), None


def moved(tensor: DTensor, wanted: Sequence[Placement]) -> DTensor:
    """Change the placements of a DTensor that autograd does not follow, of any dtype.

    Gloo knows few dtypes, so bytes are sent unless values are to be reduced: the bytes of an element become
    a last dimension, which is not cut.
    """
    local, mesh = tensor._local_tensor, tensor.device_mesh
    if type(local) is not Tensor or any(p.is_partial() for p in (*tensor.placements, *wanted)):
        return DTensor.redistribute(tensor, placements=wanted)
    wanted = [Shard(p.dim % tensor.ndim) if type(p) is Shard else p for p in wanted]
    shape, stride = (*tensor.shape, tensor.itemsize), tensor.stride()
    here = dtensor_of(
        local.detach().unsqueeze(-1).view(torch.uint8),
        mesh,
        tensor.placements,
        shape=shape,
        stride=(*(n * tensor.itemsize for n in stride), 1),
    )
    there = DTensor.redistribute(here, placements=wanted)._local_tensor
    whole = there.contiguous().view(tensor.dtype).squeeze(-1)
    return dtensor_of(whole, mesh, wanted, shape=tensor.shape, stride=stride)


def part_of(tensor: DTensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor that is cut like `tensor`, on its device; mostly a view of it."""
    for over, placement in enumerate(tensor.placements):
        mine = tensor.device_mesh.get_local_rank(over)
        if isinstance(placement, NodeShard):
            first, count = placement.rows_at(whole.shape[placement.dim], mine)
            whole = whole.narrow(placement.dim, first, count)
        elif not placement.is_replicate():
            # As `layout`, [Note: chunk order], says: cut over the places, then over the nodes.
            dim: int = getattr(placement, "dim")  # noqa: B009  # Shard and the strided shard have one
            ranks = tensor.device_mesh.size(over)
            runs = rows_of_part(whole.shape[dim], ranks, mine, matrices_in(placement))
            parts = [whole.narrow(dim, *run) for run in runs]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def has_part_of_shape(tensor: DTensor, shape: Sequence[int]) -> bool:
    """Whether a shape is that of the first rank's part of a sharded tensor, the largest, and not its own."""
    if len(shape) != tensor.ndim or tuple(shape) == tuple(tensor.shape) or set(shape) == {1}:
        return False
    return tuple(shape) == tuple(map(max, _sizes_of_parts(tensor)))


def leaves_ranks_empty(tensor: DTensor) -> bool:
    """Whether there are ranks that have no element of a sharded tensor."""
    return any(0 in sizes for sizes in _sizes_of_parts(tensor))


def _sizes_of_parts(tensor: DTensor) -> list[set[int]]:
    """For each dimension of a sharded tensor, the sizes that ranks' parts have in it."""
    sizes = [{size} for size in tensor.shape]
    for over, placement in enumerate(tensor.placements):
        dim: int | None = getattr(placement, "dim", None)
        if dim is not None and not isinstance(placement, NodeShard):
            ranks, matrices = tensor.device_mesh.size(over), matrices_in(placement)
            sizes[dim] = {
                rows * matrices
                for size in sizes[dim]
                for rows in chunk_rows(size // matrices, ranks)
            }
    return sizes


def cuts_rows(tensor: DTensor, shape: Sequence[int]) -> bool:
    """Whether a view to this shape cannot be taken shard by shard; DTensor refuses such views, or fails.

    shape: as for torch's `view`; one size may be -1.
    """
    cut = {p.dim for p in tensor.placements if isinstance(p, Shard)}
    sizes = tuple(shape)
    if -1 in sizes:
        sizes = torch.empty(tensor.shape, device="meta").view(shape).shape
    if not cut or sizes[: max(cut) + 1] == tensor.shape[: max(cut) + 1]:
        return False
    ranks = tensor.device_mesh.size()
    return cut != {0} or bool(tensor.shape[0] % ranks or sizes[0] % ranks)
