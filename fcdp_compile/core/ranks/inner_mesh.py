"""The meshes that `make_mesh` makes: data parallelism with other dimensions around it and inside of it.

    ("pp", "inter", "intra", "cp", "tp")   P x N x a x c x t ranks; what users pass
    ("inter", "intra")                     N x (a c) ranks of this rank's stage, with its place in "tp"; this
                                           is the data mesh, over which fcdp cuts home shards and averages

Ranks of one "pp" group have different stages of a model, ranks of one "cp" group the same parameters and
different parts of the same sequences, ranks of one "tp" group the same batch and different parts of
parameters.  Dimensions of one rank are left out, but for "inter" and "intra".

    ("intra", "inter")                     the home mesh, that of the DTensors, perhaps with "tp" in front
    ("all",)                               its ranks as one dimension: DTensor reduces once for each dimension
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.core.ranks.lost_ranks import world
from fcdp_compile.core.ranks.process_groups import group_of

V = TypeVar("V")

PP, INTER, INTRA, CP, TP = "pp", "inter", "intra", "cp", "tp"
_NAMES = (PP, INTER, INTRA, CP, TP)
CONTEXT = "fcdp_context"
"""The attribute of attention modules that know which ranks share sequences."""
CUT = "fcdp_cut"
"""The attribute of a model after `tensor_parallel`, a `Cut`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What `tensor_parallel` has cut.

    model: the id of the model; a copy of the model would compute with the model's own parameters.
    names, ids: of all parameters.  declared: names of those that `declare_part` was called for.
    """

    model: int
    names: frozenset[str]
    ids: frozenset[int]
    declared: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inner:
    """The inner dimensions of a mesh; the default has none.

    cp: how many ranks share one sequence.  tp: the mesh of the ranks that share each parameter with this
    rank, or None.  planes: the ranks of this rank's stage [N, a c, t].  ranks: how many the groups of "cp"
    and "tp" have, by name of the group.
    """

    cp: int = 1
    tp: DeviceMesh | None = None
    planes: Tensor | None = None
    ranks: Mapping[str, int] = field(default_factory=dict)


class OfMeshes(Generic[V]):
    """A value for each of several meshes, for as long as the mesh lives; equal meshes are several."""

    def __init__(self) -> None:
        self._values: dict[int, V] = {}

    def get(self, mesh: DeviceMesh) -> V | None:
        """The value that was kept for the mesh, if any."""
        return self._values.get(id(mesh))

    def keep(self, mesh: DeviceMesh, value: V) -> V:
        """Keep a value, and return it."""
        self._values[id(mesh)] = value
        weakref.finalize(mesh, self._values.pop, id(mesh), None).atexit = False
        return value


def mesh_of_ranks(
    device_type: str, ranks: Tensor, timeout: timedelta | None
) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Make the mesh of these ranks [P, N, a, c, t], and its data mesh; all ranks must call it.

    Returns the mesh, and its data mesh's group between nodes.
    """
    planes = ranks.flatten(2, 3)
    stage, _, _, place = (planes == dist.get_rank()).nonzero()[0].tolist()
    inter, intra = _group_along(planes, 1, timeout), _group_along(planes, 2, timeout)
    data = DeviceMesh.from_group(
        [inter, intra], device_type, mesh=planes[stage, ..., place], mesh_dim_names=(INTER, INTRA)
    )
    kept = [i for i, n in enumerate(_NAMES) if n in (INTER, INTRA) or ranks.shape[i] > 1]
    if len(kept) == 2:
        return data, inter
    known = {INTER: inter} if ranks.shape[3] > 1 else {INTER: inter, INTRA: intra}
    mesh = DeviceMesh.from_group(
        [known.get(_NAMES[i]) or _group_along(ranks, i, timeout) for i in kept],
        device_type,
        mesh=ranks.reshape([ranks.shape[i] for i in kept]),
        mesh_dim_names=tuple(_NAMES[i] for i in kept),
    )
    tp = None
    if ranks.shape[4] > 1:
        # Not `mesh["tp"]`, which would keep the mesh alive for ever.
        tp = DeviceMesh.from_group(mesh.get_group(TP), device_type, mesh_dim_names=(TP,))
    sizes = {
        str(mesh.get_group(_NAMES[i]).group_name): ranks.shape[i]
        for i in kept
        if _NAMES[i] in (CP, TP)
    }
    _data_meshes.keep(mesh, data)
    for made in (mesh, data):
        _inner.keep(made, Inner(cp=ranks.shape[3], tp=tp, planes=planes[stage], ranks=sizes))
    return mesh, inter


_data_meshes = OfMeshes[DeviceMesh]()
"""The data meshes of meshes with more dimensions."""
_inner = OfMeshes[Inner]()
"""The inner dimensions of such meshes, and of their data meshes."""


def _group_along(ranks: Tensor, dim: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """The group of this rank and the ranks that differ from it in one dimension."""
    rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim])
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
    return group


def inner_of(mesh: DeviceMesh | None) -> Inner:
    """The inner dimensions of a mesh that `make_mesh` made, or of its data mesh; none for a plain one."""
    return (None if mesh is None else _inner.get(mesh)) or Inner()


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ("inter", "intra") mesh of a mesh with more dimensions; any other mesh as it is."""
    return _data_meshes.get(mesh) or mesh


def cp_of(mesh: DeviceMesh | None) -> int:
    """How many ranks share one sequence; 1 for a mesh without "cp"."""
    return inner_of(mesh).cp


def tp_of(mesh: DeviceMesh | None) -> int:
    """How many ranks share each parameter; 1 for a mesh without "tp"."""
    return 1 if (tp := tp_mesh_of(mesh)) is None else tp.size()


def tp_mesh_of(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of the ranks that share each parameter with this rank; None for a mesh without "tp"."""
    return inner_of(mesh).tp


@dataclass(slots=True, kw_only=True)
class AllRanks:
    """Meshes of one dimension, for reductions of DTensors on a home mesh.

    mesh: over all ranks.  data: over those with this rank's place in "tp".
    sent_bytes: how much each node has sent to others for ops of DTensors.  The Python thread communicates in
    the mesh's group (`core.params.mesh` [Note: groups of our own]).
    """

    mesh: DeviceMesh
    data: DeviceMesh
    sent_bytes: int = 0


_all_ranks = OfMeshes[AllRanks]()


def all_ranks_of(home_mesh: DeviceMesh) -> AllRanks | None:
    """All ranks of a home mesh; None for any other mesh."""
    return _all_ranks.get(home_mesh)


def keep_all_ranks(
    home_mesh: DeviceMesh, data: list[int], intra: dist.ProcessGroup, timeout: timedelta | None
) -> list[dist.ProcessGroup]:
    """Make the flat meshes of a home mesh.  data: the ranks of this rank's data mesh."""
    ranks = sorted(home_mesh.mesh.flatten().tolist())
    groups = [
        world()
        if len(some) == dist.get_world_size()
        else group_of(some, timeout, dist.get_backend(intra))
        for some in ([ranks] if len(data) == len(ranks) else [ranks, sorted(data)])
    ]
    flat = [
        DeviceMesh.from_group(group, home_mesh.device_type, mesh_dim_names=("all",))
        for group in groups
    ]
    _all_ranks.keep(home_mesh, AllRanks(mesh=flat[0], data=flat[-1]))
    return groups
