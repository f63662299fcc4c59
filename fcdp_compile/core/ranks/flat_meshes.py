"""Meshes of one dimension over the ranks of a home mesh: DTensor would reduce once for each dimension."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.core.ranks.process_groups import group_of


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


def all_ranks_of(home_mesh: DeviceMesh) -> AllRanks | None:
    """All ranks of a home mesh; None for any other mesh."""
    return _all_ranks.get(id(home_mesh))


_all_ranks: dict[int, AllRanks] = {}
"""The mesh over all ranks of each live home mesh, by the home mesh's id."""


def keep_all_ranks(
    home_mesh: DeviceMesh, data: list[int], intra: dist.ProcessGroup, timeout: timedelta | None
) -> list[dist.ProcessGroup]:
    """Make the flat meshes of a home mesh.  data: the ranks of this rank's data mesh."""
    ranks = sorted(home_mesh.mesh.flatten().tolist())
    groups = [
        dist.group.WORLD
        if len(some) == dist.get_world_size()
        else group_of(some, timeout, dist.get_backend(intra))
        for some in ([ranks] if len(data) == len(ranks) else [ranks, sorted(data)])
    ]
    flat = [
        DeviceMesh.from_group(group, home_mesh.device_type, mesh_dim_names=("all",))
        for group in groups
        if group is not None
    ]
    _all_ranks[id(home_mesh)] = AllRanks(mesh=flat[0], data=flat[-1])
    weakref.finalize(home_mesh, _all_ranks.pop, id(home_mesh), None).atexit = False
    return [group for group in groups if group is not None]
