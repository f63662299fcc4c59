"""Meshes with dimensions inside of a node: context parallelism, "cp", and tensor parallelism, "tp".

    ("inter", "intra", "cp", "tp")   N x a x c x t ranks; what `make_mesh(cp=c, tp=t)` returns and users pass
    ("inter", "intra")               N x (a c) ranks with the same place in "tp", the data mesh: over these,
                                     fcdp cuts home shards and averages gradients

Ranks of one "cp" group have the same parameters and different parts of the same sequences.  Ranks of one "tp"
group have the same batch and different parts of parameters.  A dimension of one rank is left out.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

INTER, INTRA, CP, TP = "inter", "intra", "cp", "tp"
CONTEXT = "fcdp_context"
"""The attribute of attention modules that know which ranks share sequences."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inner:
    """The inner dimensions of a mesh.

    cp: how many ranks share one sequence.  tp: the mesh of the ranks that share each parameter with this
    rank, or None.  planes: all ranks [N, a c, t].
    """

    cp: int
    tp: DeviceMesh | None
    planes: Tensor


def make_inner_mesh(
    device_type: str, ranks: Tensor, timeout: timedelta | None
) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Make the mesh of these ranks [N, a, c, t], and its data mesh; all ranks must call it.

    Returns the mesh, and its data mesh's group between nodes.
    """
    planes = ranks.flatten(1, 2)
    here = int((planes == dist.get_rank()).nonzero()[0, 2])
    inter, intra = _group_along(planes, 0, timeout), _group_along(planes, 1, timeout)
    data = DeviceMesh.from_group(
        [inter, intra], device_type, mesh=planes[..., here], mesh_dim_names=(INTER, INTRA)
    )
    inside = {name: i for i, name in ((2, CP), (3, TP)) if ranks.shape[i] > 1}
    if not inside:
        return data, inter
    groups = [inter, *(_group_along(ranks, i, timeout) for i in (1, *inside.values()))]
    shape = [ranks.shape[i] for i in (0, 1, *inside.values())]
    mesh = DeviceMesh.from_group(
        groups, device_type, mesh=ranks.reshape(shape), mesh_dim_names=(INTER, INTRA, *inside)
    )
    tp = mesh[TP] if TP in inside else None
    _keep(_data_meshes, mesh, data)
    for known in (mesh, data):
        _keep(_inner, known, Inner(cp=ranks.shape[2], tp=tp, planes=planes))
    return mesh, inter


V = TypeVar("V")
_data_meshes: dict[int, DeviceMesh] = {}
"""The data mesh of each live mesh with inner dimensions, by that mesh's id."""
_inner: dict[int, Inner] = {}
"""The inner dimensions of each live mesh that has any, by that mesh's id and by its data mesh's."""


def _keep(values: dict[int, V], mesh: DeviceMesh, value: V) -> None:
    """Keep a value for as long as the mesh lives."""
    values[id(mesh)] = value
    weakref.finalize(mesh, values.pop, id(mesh), None).atexit = False


def _group_along(ranks: Tensor, dim: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """The group of this rank and the ranks that differ from it in one dimension."""
    rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim])
    return dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)[0]


def inner_of(mesh: DeviceMesh | None) -> Inner | None:
    """The inner dimensions of a mesh that `make_mesh` made, or of its data mesh; None without any."""
    return None if mesh is None else _inner.get(id(mesh))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ("inter", "intra") mesh of a mesh with inner dimensions; any other mesh as it is."""
    return _data_meshes.get(id(mesh), mesh)


def cp_of(mesh: DeviceMesh | None) -> int:
    """How many ranks share one sequence; 1 for a mesh without "cp"."""
    inner = inner_of(mesh)
    return 1 if inner is None else inner.cp


def tp_mesh_of(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of the ranks that share each parameter with this rank; None for a mesh without "tp"."""
    inner = inner_of(mesh)
    return None if inner is None else inner.tp
