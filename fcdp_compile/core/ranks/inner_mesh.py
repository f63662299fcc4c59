"""The meshes that `make_mesh` makes: data parallelism with other dimensions around it and inside of it.

    ("pp", "inter", "intra", "cp", "tp")   P x N x a x c x t ranks; what users pass
    ("inter", "intra")                     N x (a c) ranks of this rank's stage, with its place in "tp"; this
                                           is the data mesh, over which fcdp cuts home shards and averages

Ranks of one "pp" group have different stages of a model, ranks of one "cp" group the same parameters and
different parts of the same sequences, ranks of one "tp" group the same batch and different parts of
parameters.  Dimensions of one rank are left out, but for "inter" and "intra".
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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
    """The inner dimensions of a mesh.

    cp: how many ranks share one sequence.  tp: the mesh of the ranks that share each parameter with this
    rank, or None.  planes: the ranks of this rank's stage [N, a c, t].  ranks: how many the groups of "cp"
    and "tp" have, by name of the group.
    """

    cp: int
    tp: DeviceMesh | None
    planes: Tensor
    ranks: Mapping[str, int]


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
    _keep(_data_meshes, mesh, data)
    for made in (mesh, data):
        _keep(_inner, made, Inner(cp=ranks.shape[3], tp=tp, planes=planes[stage], ranks=sizes))
    return mesh, inter


V = TypeVar("V")
_data_meshes: dict[int, DeviceMesh] = {}
"""The data mesh of each live mesh with more dimensions, by that mesh's id."""
_inner: dict[int, Inner] = {}
"""The inner dimensions of each such mesh, by its id and by its data mesh's."""


def _keep(values: dict[int, V], mesh: DeviceMesh, value: V) -> None:
    """Keep a value for as long as the mesh lives."""
    values[id(mesh)] = value
    weakref.finalize(mesh, values.pop, id(mesh), None).atexit = False


def _group_along(ranks: Tensor, dim: int, timeout: timedelta | None) -> dist.ProcessGroup:
    """The group of this rank and the ranks that differ from it in one dimension."""
    rows = ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim])
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)
    return group


def inner_of(mesh: DeviceMesh | None) -> Inner | None:
    """The inner dimensions of a mesh that `make_mesh` made, or of its data mesh; None for a plain one."""
    return None if mesh is None else _inner.get(id(mesh))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ("inter", "intra") mesh of a mesh with more dimensions; any other mesh as it is."""
    return _data_meshes.get(id(mesh), mesh)


def cp_of(mesh: DeviceMesh | None) -> int:
    """How many ranks share one sequence; 1 for a mesh without "cp"."""
    inner = inner_of(mesh)
    return 1 if inner is None else inner.cp


def tp_of(mesh: DeviceMesh | None) -> int:
    """How many ranks share each parameter; 1 for a mesh without "tp"."""
    return 1 if (tp := tp_mesh_of(mesh)) is None else tp.size()


def tp_mesh_of(mesh: DeviceMesh | None) -> DeviceMesh | None:
    """The mesh of the ranks that share each parameter with this rank; None for a mesh without "tp"."""
    inner = inner_of(mesh)
    return None if inner is None else inner.tp
