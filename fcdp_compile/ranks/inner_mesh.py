"""Meshes with a dimension inside of a node: context parallelism, "cp".

    ("inter", "intra", "cp")   N x a x c ranks; what `make_mesh(cp=c)` returns and users pass
    ("inter", "intra")         N x (a c) ranks; over these, fcdp cuts home shards and averages gradients

Ranks of one "cp" group have the same parameters and different parts of the same sequences.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

CP = "cp"
CONTEXT = "fcdp_context"
"""The attribute of attention modules that know which ranks share sequences."""


def with_cp(data: DeviceMesh, cp: int, timeout: timedelta | None) -> DeviceMesh:
    """The mesh with "cp" whose data mesh is `data`; all ranks must call it."""
    ranks = data.mesh.unflatten(1, (-1, cp))  # [N, a, c]
    intra, along = (
        dist.new_subgroups_by_enumeration(
            rows.reshape(-1, rows.shape[-1]).tolist(), timeout=timeout
        )[0]
        for rows in (ranks.transpose(1, 2), ranks)
    )
    names = (*(data.mesh_dim_names or ()), CP)
    groups = [data.get_group(0), intra, along]
    mesh = DeviceMesh.from_group(groups, data.device_type, mesh=ranks, mesh_dim_names=names)
    _data_meshes[id(mesh)] = data
    weakref.finalize(mesh, _data_meshes.pop, id(mesh), None).atexit = False
    return mesh


_data_meshes: dict[int, DeviceMesh] = {}
"""The data mesh of each live mesh with "cp", by that mesh's id."""


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ("inter", "intra") mesh of a mesh with "cp" that `make_mesh` made; any other mesh as it is."""
    return _data_meshes.get(id(mesh), mesh)


def cp_of(mesh: DeviceMesh | None) -> int:
    """How many ranks share one sequence; 1 for a mesh without "cp"."""
    return mesh.size(2) if mesh is not None and id(mesh) in _data_meshes else 1
