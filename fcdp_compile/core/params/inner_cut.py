"""The part of a parameter that one rank of a "tp" group has: the whole that fcdp shards."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from fcdp_compile.core.params.home_collectives import device_of_collectives, moved, put_on
from fcdp_compile.core.params.layout import Within, rows_of_part
from fcdp_compile.core.ranks.inner_mesh import tp_mesh_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.torch_compat.placements import matrices_in

_DECLARED = "_fcdp_part"


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCut:
    """How a parameter is cut over the ranks of a "tp" group, before fcdp cuts each rank's part.

    shape: of the whole parameter.  placement: on the "tp" mesh: Replicate, Shard, or torch's strided shard,
    which has a part of each of several matrices that lie one after the other in one parameter.
    index, ranks: this rank's number in the group, and how many there are.  mesh: of the DTensor that modules
    compute with; None if they compute with a plain tensor.  sums: whether modules compute with a plain tensor
    whose gradients are summed over the group.  group: the ranks that share a parameter that was declared.
    """

    shape: tuple[int, ...]
    placement: Placement
    index: int
    ranks: int
    mesh: DeviceMesh | None = None
    sums: bool = False
    group: tuple[int, ...] = ()

    @staticmethod
    def of(parameter: Tensor, mesh: DeviceMesh) -> InnerCut:
        """The cut of a parameter of a model that is not sharded yet.  mesh: of the "tp" group."""
        if (declared := getattr(parameter, _DECLARED, None)) is not None:
            found: InnerCut = declared
            return found
        cut = parameter if isinstance(parameter, DTensor) else None
        return InnerCut(
            shape=tuple(parameter.shape),
            placement=Replicate() if cut is None else cut.placements[0],
            index=mesh.get_local_rank(),
            ranks=mesh.size(),
            mesh=None if cut is None else cut.device_mesh,
        )

    @property
    def dim(self) -> int | None:
        """The dimension that is cut; None for a parameter that every rank of the group has whole."""
        dim: int | None = getattr(self.placement, "dim", None)
        return None if dim is None else dim % len(self.shape)

    def within(self, index: int) -> Within | None:
        """The rows of the whole that a rank of the group has; None if every rank has the whole."""
        if self.dim is None:
            return None
        size, matrices = self.shape[self.dim], matrices_in(self.placement)
        return Within(self.dim, tuple(rows_of_part(size, self.ranks, index, matrices)))

    def part_shape(self, index: int) -> tuple[int, ...]:
        """The shape of the part that a rank of the group has."""
        if (within := self.within(index)) is None:
            return self.shape
        dim, runs = within
        return (*self.shape[:dim], sum(run.rows for run in runs), *self.shape[dim + 1 :])

    @property
    def kept_dim(self) -> int | None:
        """The dimension that fcdp must not cut again: torch gives a strided shard another meaning then."""
        return self.dim if matrices_in(self.placement) > 1 else None

    def problem(self) -> str | None:
        """Why fcdp cannot shard a parameter that is cut so; None if it can."""
        if self.placement.is_partial():
            return f"has the placement {self.placement}; redistribute it first"
        dim, matrices = self.dim, matrices_in(self.placement)
        if dim is not None and matrices > 1 and self.shape[dim] % (matrices * self.ranks):
            return (
                f"has {self.shape[dim]} rows, which {matrices} x {self.ranks} parts do not divide"
            )
        if self.kept_dim is not None and len(self.shape) == 1:
            return (
                "has one dimension and a strided shard, so fcdp cannot cut it in another dimension"
            )
        return None


class InnerTensor:
    """Makes what modules compute with out of this rank's part of a parameter; autograd runs through it."""

    def __init__(self, cut: InnerCut) -> None:
        self.mesh = cut.mesh
        self.placements = (cut.placement,)
        self.shape = torch.Size(cut.shape)
        self.stride = torch.empty(cut.shape, device="meta").stride()
        self.sums = cut.sums

    def of(self, part: Tensor) -> Tensor:
        """The DTensor of which this rank has `part`, or `part` with a gradient that is summed."""
        made = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )
        return made.to_local(grad_placements=[Partial()]) if self.sums else made


def whole_of(part: Tensor, cut: InnerCut | None, tp: DeviceMesh | None) -> Tensor:
    """The whole parameter that this rank has a part of; all ranks of the "tp" group must call it."""
    if cut is None or cut.dim is None:
        return part
    made = InnerTensor(replace(cut, mesh=tp, sums=False)).of(part)
    assert isinstance(made, DTensor), "nothing is summed"
    here = put_on(made, device_of_collectives(made.device_mesh))
    whole = here.full_tensor() if made.requires_grad else moved(here, [Replicate()])._local_tensor
    return whole.to(part.device)


def declare_part(
    parameter: nn.Parameter,
    mesh: DeviceMesh | None,
    placement: Placement,
    *,
    sum_gradients: bool = False,
) -> None:
    """Say that a plain parameter is this rank's part of a parameter that the "tp" ranks of a mesh share.

    For tensor parallel code of one's own that computes with plain tensors, before `shard`.  Without it, a
    plain parameter must have equal values on the ranks of a "tp" group.  Another parameter in its place, such
    as a copy of the module has, is not declared.

    mesh: from `make_mesh(tp=…)`; without "tp" in it nothing happens.  placement: Shard(dim), where all ranks
    have parts of one size, or Replicate().  sum_gradients: of a replicated parameter whose gradient on each
    rank is only a part, such as a norm's of some heads or of a part of the sequence.

    Raises: ArgumentError for a DTensor, which has a placement, and for other placements.
    """
    if (tp := tp_mesh_of(mesh)) is None:
        return
    if isinstance(parameter, DTensor) or not isinstance(parameter, nn.Parameter):
        raise ArgumentError(
            f"declare_part takes a plain nn.Parameter, not {type(parameter).__name__}; a DTensor on "
            'mesh["tp"] needs no declaration'
        )
    dim = getattr(placement, "dim", None)
    shape = list(parameter.shape)
    is_known = placement.is_replicate() or (
        placement.is_shard()
        and not sum_gradients
        and dim is not None
        and -len(shape) <= dim < len(shape)
    )
    if not is_known:
        raise ArgumentError(
            f"declare_part takes Shard of a dimension that the parameter of shape {tuple(shape)} has, or "
            f"Replicate, which alone may sum gradients, not {placement} with {sum_gradients=}"
        )
    if dim is not None:
        shape[dim] *= tp.size()
        placement = Shard(dim % len(shape))  # as DTensor writes it
    cut = InnerCut(
        shape=tuple(shape),
        placement=placement,
        index=tp.get_local_rank(),
        ranks=tp.size(),
        mesh=tp if sum_gradients else None,
        sums=sum_gradients,
        group=tuple(dist.get_process_group_ranks(tp.get_group())),
    )
    setattr(parameter, _DECLARED, cut)


def is_declared(parameter: Tensor) -> bool:
    """Whether `declare_part` was called for a parameter."""
    return hasattr(parameter, _DECLARED)


def check_declared(parameter: Tensor, tp: DeviceMesh | None) -> str | None:
    """Why a parameter that was declared cannot be sharded over a mesh with this "tp" mesh; None if it can."""
    declared: InnerCut | None = getattr(parameter, _DECLARED, None)
    if declared is None:
        return None
    wanted = () if tp is None else tuple(dist.get_process_group_ranks(tp.get_group()))
    if declared.group == wanted:
        return None
    has = f"has ranks {list(wanted)}" if wanted else "is missing"
    return (
        f'was declared as a part over ranks {list(declared.group)}, but "tp" of the mesh that shard gets '
        f"{has}; give shard the mesh that declare_part or tensor_parallel got"
    )


def local_part(parameter: Tensor) -> Tensor:
    """The tensor that this rank has of a parameter, which may be a DTensor on a "tp" mesh."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def check_inner(parameter: DTensor, tp: DeviceMesh | None) -> str | None:
    """Why a parameter that is a DTensor cannot be sharded over a mesh with this "tp" mesh; None if it can."""
    if tp is None:
        return (
            "is a DTensor already (FSDP2 or tensor parallelism); pass a model with plain parameters, or for "
            "tensor parallelism a mesh from fcdp_compile.make_mesh(tp=…)"
        )
    # Not `mesh.mesh`, which is a tensor: a plan traces with fake tensors.
    found = [dist.get_process_group_ranks(g) for g in parameter.device_mesh.get_all_groups()]
    wanted = dist.get_process_group_ranks(tp.get_group())
    if found != [wanted]:
        return (
            f'is a DTensor over ranks {found}, but this rank\'s "tp" mesh has ranks {wanted}; use mesh["tp"] '
            "of the mesh that shard gets"
        )
    return InnerCut.of(parameter, tp).problem()


def described(cut: InnerCut | None) -> str:
    """The cut in words that are the same on all ranks; empty for a parameter that no "tp" group shares."""
    if cut is None:
        return ""
    return f', {cut.placement} of {cut.shape} on "tp"' + (", gradients summed" if cut.sums else "")
