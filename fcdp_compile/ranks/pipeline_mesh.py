"""Meshes whose ranks are grouped into the stages of a pipeline, "pp".

    ("pp", "inter", "intra")   P stages of N x g ranks; what `make_mesh(pp=P)` returns and users pass
    ("inter", "intra")         N x g ranks of this rank's stage; over these, fcdp shards the stage

A stage is a group of whole nodes; on a single node, a group of its ranks.  The ranks of one "pp" group are at
the same place of all stages.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.errors import ArgumentError
from fcdp_compile.ranks.differences import first_other

PP = "pp"


def agreed_stages(nodes: int, ranks_per_node: int, pp: int, cp: int) -> Tensor:
    """The ranks of each stage [P, N, g], after a check that every rank makes the same stages.

    nodes, ranks_per_node: of the whole job, the same on all ranks.

    Raises: ArgumentError on all ranks.
    """
    try:
        mine: Tensor | str = _stages(nodes, ranks_per_node, pp, cp)
    except ArgumentError as error:
        mine = str(error)
    world = nodes * ranks_per_node
    own: int | str = mine if isinstance(mine, str) else pp
    everyone: list[int | str] = [own] * world
    if world > 1 and dist.get_backend() != "fake":  # a fake group has no other ranks
        dist.all_gather_object(everyone, own)
    for found in everyone:
        if isinstance(found, str):
            raise ArgumentError(found)
    if other := first_other(everyone):
        raise ArgumentError(
            f"rank 0 has pp={everyone[0]} and rank {other} has pp={everyone[other]}; pass the same pp=… on "
            "all ranks"
        )
    assert not isinstance(mine, str), mine
    return mine


def _stages(nodes: int, ranks_per_node: int, pp: int, cp: int) -> Tensor:
    cut, what = (ranks_per_node, "ranks of a node") if nodes == 1 else (nodes, "nodes")
    if isinstance(pp, bool) or not isinstance(pp, int) or pp < 1 or cut % pp:
        raise ArgumentError(
            f"pp={pp!r} must be a whole number that divides the {cut} {what}, because each stage has equally "
            "many; pass another pp=…"
        )
    if pp > 1 and cp > 1:
        raise ArgumentError(
            f"pp={pp} and cp={cp} cannot be used together: context_parallel takes whole models; leave one out"
        )
    ranks = torch.arange(nodes * ranks_per_node, device="cpu")
    return ranks.view(pp, 1 if nodes == 1 else nodes // pp, -1)


def with_pp(data: DeviceMesh, stages: Tensor, timeout: timedelta | None) -> DeviceMesh:
    """The mesh with "pp" of all stages [P, N, g]; all ranks must call it.

    data: the mesh of this rank's stage.
    """
    places = stages.flatten(1).T.tolist()
    along, _ = dist.new_subgroups_by_enumeration(places, timeout=timeout)
    names = (PP, *(data.mesh_dim_names or ()))
    groups = [along, *data.get_all_groups()]
    mesh = DeviceMesh.from_group(groups, data.device_type, mesh=stages, mesh_dim_names=names)
    _stage_meshes[id(mesh)] = data
    weakref.finalize(mesh, _stage_meshes.pop, id(mesh), None).atexit = False
    return mesh


_stage_meshes: dict[int, DeviceMesh] = {}
"""The mesh of this rank's stage of each live mesh with "pp", by that mesh's id."""


def stage_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of this rank's stage of a mesh with "pp" that `make_mesh` made; any other mesh as it is."""
    return _stage_meshes.get(id(mesh), mesh)
