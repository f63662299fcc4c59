"""The mesh that a user makes, and the topology that all other code reads from the mesh."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.core.params.spec import Home
from fcdp_compile.core.ranks.inner_mesh import (
    INTER,
    INTRA,
    TP,
    OfMeshes,
    inner_of,
    keep_all_ranks,
    mesh_of_ranks,
)
from fcdp_compile.core.ranks.lost_ranks import RollCall, naming_lost_ranks
from fcdp_compile.core.ranks.node_count import agreed_nodes
from fcdp_compile.core.ranks.process_groups import (
    checked_timeout,
    cpu_backend,
    group_of,
    timeout_of_new_groups,
)
from fcdp_compile.core.ranks.rendezvous import initialise
from fcdp_compile.devices import are_on_stream, choose_device
from fcdp_compile.errors import ArgumentError
from fcdp_compile.strategy import Scope

log = logging.getLogger(__name__)

V = TypeVar("V")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Topology:
    """N nodes of g ranks, the position of this rank, and the process groups it communicates in.

    node, place: n and l of this rank.  home_mesh: the ("intra", "inter") mesh of the DTensors (`layout`,
    [Note: chunk order]).  control: a CPU group over all ranks for small agreements.  In one process without
    torch.distributed there are no groups and no mesh.

    tp: the mesh of the ranks that share each parameter with this rank, or None.  With it, the N x g ranks are
    those at the same place of this mesh, which have the same parts of parameters; home_mesh is ("tp",
    "intra", "inter"), and everyone is a CPU group over all of its ranks.  Without it, everyone is `control`.
    inner_ranks: how many ranks each group has in which the model itself communicates ("cp", "tp"), by name.

    [Note: groups of our own] Where collectives block, threads begin them, and if members of a group begin its
    collectives in different orders, the group silently mixes them up.  So inter and intra are then not the
    mesh's own groups, in which the Python thread communicates for DTensors and for the user.  Models on one
    mesh share these groups and the lanes that use them (`runtime.lanes.lanes.Lanes.shared`).
    """

    nodes: int
    ranks_per_node: int
    node: int
    place: int
    device_type: str
    home_mesh: DeviceMesh | None
    inter: dist.ProcessGroup | None
    intra: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    timeout: timedelta | None = None
    roll_call: RollCall | None = None
    tp: DeviceMesh | None = None
    everyone: dist.ProcessGroup | None = None
    inner_ranks: Mapping[str, int] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """G, the number of ranks."""
        return self.nodes * self.ranks_per_node

    def home(self, scope: Scope) -> Home:
        """This rank's position among the ranks that home shards of a scope are cut over."""
        return self.position.of(scope)

    @property
    def sharers(self) -> int:
        """t, the number of ranks that share each parameter ("tp")."""
        return 1 if self.tp is None else self.tp.size()

    @property
    def number(self) -> int:
        """This rank's number among all N x g x t ranks, counted node by node and place by place."""
        index = 0 if self.tp is None else self.tp.get_local_rank()
        return self.position.rank * self.sharers + index

    def among_sharers(self, told: Sequence[V]) -> Iterator[tuple[list[int], list[V]]]:
        """Each group of ranks that share parameters, and what they told.  told: by rank of `everyone`."""
        if self.home_mesh is None or self.tp is None:
            return
        ranks = self.home_mesh.mesh.flatten(1)
        places = {rank: i for i, rank in enumerate(sorted(ranks.flatten().tolist()))}
        for group in ranks.T.tolist():
            yield group, [told[places[rank]] for rank in group]

    @property
    def position(self) -> Home:
        """This rank's position among all ranks."""
        return Home(
            nodes=self.nodes,
            ranks_per_node=self.ranks_per_node,
            node=self.node,
            place=self.place,
        )


def make_mesh(
    nodes: int | None = None,
    *,
    pp: int = 1,
    cp: int = 1,
    tp: int = 1,
    timeout: timedelta | float | None = None,
) -> DeviceMesh | None:
    """Make the ("inter", "intra") mesh from torchrun's environment.

    Initialises torch.distributed if torchrun started this process and torch.distributed is not initialised
    yet.  In a single process without torchrun it returns None, which `shard` takes as one node of one rank.

    nodes: how many nodes; by default world size / LOCAL_WORLD_SIZE.  Give it to split one machine.
    pp: how many stages a pipeline has (`PipelineStage`); with more than one, the nodes, or the ranks of a
    single node, are divided into stages, and the mesh has another dimension, "pp", the first.  `shard`
    shards over the ranks of this rank's stage.
    cp: how many ranks of a node share a sequence (`context_parallel`); with more than one, the mesh has
    another dimension, "cp".
    tp: how many ranks of a node share each parameter (`tensor_parallel`, or torch's parallelize_module on
    mesh["tp"]); with more than one, the mesh has another dimension, "tp", the last.
    timeout: how long a rank waits for others before it raises LostRankError, in seconds or as a timedelta; by
    default the timeout of the default process group, which is NCCL's own 10 minutes if this function
    initialises that group for GPUs.  The timeout is used for all groups that fcdp makes for this mesh, and
    for the default group if this function initialises it.

    Raises: ValueError on all ranks if they cannot be divided into nodes, or if their meshes would differ.
    """
    chosen = checked_timeout(timeout)
    if not dist.is_initialized() and "RANK" not in os.environ:
        wanted = {"nodes": nodes or 1, "pp": pp, "cp": cp, "tp": tp}
        if more := {name: size for name, size in wanted.items() if size != 1}:
            asked = ", ".join(f"{name}={size}" for name, size in more.items())
            raise ArgumentError(
                f"{asked} needs several processes and this is a single one; start it with torchrun"
            )
        return None
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    local_rank = os.environ.get("LOCAL_RANK")
    device = choose_device(None if local_rank is None else int(local_rank))
    had_groups = dist.is_initialized()
    if not had_groups:
        initialise(device.backends, chosen or device.timeout)
    try:
        with naming_lost_ranks(None, "make_mesh"):
            count = agreed_nodes(world, nodes, pp, {"cp": cp, "tp": tp})
    except ValueError:
        if not had_groups:
            dist.destroy_process_group()
        raise
    limit = timeout_of_new_groups(chosen)
    # torch's init_device_mesh would give its groups torch's timeout instead of the default group's.
    ranks = torch.arange(world, device="cpu").view(pp, max(1, count // pp), -1, cp, tp)
    with naming_lost_ranks(None, "make_mesh, as groups are made"):
        mesh, inter = mesh_of_ranks(device.torch.type, ranks, limit)
    _timeouts[inter] = limit
    return mesh


_timeouts: weakref.WeakKeyDictionary[dist.ProcessGroup, timedelta | None] = (
    weakref.WeakKeyDictionary()
)
"""The timeout of the groups of a mesh that `make_mesh` made, by its inter group."""


def process_count() -> int:
    """How many processes run this job: torch.distributed's count, or torchrun's before it is initialised."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def topology_of(mesh: DeviceMesh | None) -> Topology:
    """The topology of a mesh; the first call makes process groups, so every rank of the mesh must call it.

    Raises: TypeError for anything but a DeviceMesh; ValueError if the mesh lacks "inter" and "intra" or gives
    two ranks one position, or if there is no mesh though several processes run.
    """
    if mesh is None:
        if (world := process_count()) > 1:
            raise ArgumentError(
                f"{world} processes run but shard got no mesh; pass fcdp_compile.make_mesh()"
            )
        return Topology(
            nodes=1, ranks_per_node=1, node=0, place=0, device_type="cpu",
            home_mesh=None, inter=None, intra=None, control=None,
        )  # fmt: skip
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"mesh must be a DeviceMesh or None, not {type(mesh).__name__}")
    names = mesh.mesh_dim_names or ()
    if tuple(names) != (INTER, INTRA):
        raise ArgumentError(
            f"mesh has dimensions {tuple(names) or 'without names'}, expected ('inter', 'intra'); "
            "make it with fcdp_compile.make_mesh()"
        )
    if (known := _topologies.get(mesh)) is not None:
        return known
    if len(set(_positions(mesh.mesh).values())) < mesh.mesh.numel():
        raise ArgumentError(
            f"mesh {mesh.mesh.tolist()} gives two ranks the same position, because torch sorts the ranks of "
            "a group; list the ranks of every node in the same order, or make the mesh with "
            "fcdp_compile.make_mesh()"
        )
    return _topologies.keep(mesh, _make_topology(mesh))


_topologies = OfMeshes[Topology]()
"""Kept because torch never frees a group."""


def _make_topology(mesh: DeviceMesh) -> Topology:
    inter, intra = mesh.get_group(INTER), mesh.get_group(INTRA)
    inner = inner_of(mesh)
    tp = inner.tp
    nodes, ranks_per_node = mesh.mesh.shape
    ranks: list[int] = mesh.mesh.flatten().tolist()
    # Flattening this mesh would save DTensor a collective, but give wrong values without an error: torch 2.13
    # then gathers uneven shards as if the rows had been cut once over all ranks, not twice.
    if tp is None or inner.planes is None:
        home_mesh = DeviceMesh.from_group(
            [intra, inter], mesh.device_type, mesh=mesh.mesh.T, mesh_dim_names=(INTRA, INTER)
        )
    else:
        home_mesh = DeviceMesh.from_group(
            [tp.get_group(), intra, inter],
            mesh.device_type,
            mesh=inner.planes.permute(2, 1, 0).contiguous(),
            mesh_dim_names=(TP, INTRA, INTER),
        )
    _warn_of_staging(mesh.device_type, [inter, intra])
    timeout = _timeouts[inter] if inter in _timeouts else timeout_of_new_groups(None)
    roll_call = RollCall(sorted(home_mesh.mesh.flatten().tolist()))
    roll_call.begin()
    with naming_lost_ranks(None, "shard, as groups are made"):
        # A fake group, with which plans are traced, has no other ranks to agree with.
        is_fake = dist.get_backend() == "fake"
        control = None if is_fake else group_of(ranks, timeout, cpu_backend())
        own_inter, own_intra = (_own(g, mesh.device_type, timeout) for g in (inter, intra))
        every = keep_all_ranks(home_mesh, ranks, intra, timeout)
        everyone = control
        if control is not None and tp is not None:
            everyone = group_of(sorted(home_mesh.mesh.flatten().tolist()), timeout, cpu_backend())
    roll_call.covers([inter, intra, own_inter, own_intra, control, *every, everyone])
    return Topology(
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        node=mesh.get_local_rank(INTER),
        place=mesh.get_local_rank(INTRA),
        device_type=mesh.device_type,
        home_mesh=home_mesh,
        inter=own_inter,
        intra=own_intra,
        control=control,
        timeout=timeout,
        roll_call=roll_call,
        tp=tp,
        everyone=everyone,
        inner_ranks=inner.ranks,
    )


def _warn_of_staging(device_type: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Log on rank 0, once for each mesh, that transfers between GPUs go through host memory."""
    blocking = [g for g in groups if not are_on_stream(device_type, g)]
    if device_type == "cpu" or not blocking or dist.get_rank():
        return
    found = dist.get_backend_config(blocking[0])
    if "fake" not in found:
        log.warning(
            "the process groups of this mesh have no NCCL for GPUs (%s), so every transfer between them goes "
            "through host memory; initialise torch.distributed with backend='cpu:gloo,cuda:nccl', or let "
            "fcdp_compile.make_mesh do it",
            found,
        )


def new_control_group(topology: Topology) -> dist.ProcessGroup | None:
    """Make another CPU group over all ranks of a mesh, which must all call this; None in a single process."""
    if topology.everyone is None:
        return None
    assert topology.roll_call is not None, "several processes have one"
    ranks = dist.get_process_group_ranks(topology.everyone)
    with naming_lost_ranks(topology.control, "shard, as groups are made"):
        group = group_of(ranks, topology.timeout, cpu_backend())
    topology.roll_call.covers([group])
    return group


def everyone_ranks(topology: Topology) -> dict[tuple[int, int, int], int]:
    """The rank within `Topology.everyone` of each node, place and number within a "tp" group."""
    if topology.home_mesh is None or topology.everyone is None:
        return {(0, 0, 0): 0}
    ranks = topology.home_mesh.mesh
    return {
        (*at, index): dist.get_group_rank(topology.everyone, rank)
        for index, plane in enumerate(ranks[None] if topology.tp is None else ranks)
        for rank, at in _positions(plane.T).items()
    }


def _positions(mesh: Tensor) -> dict[int, tuple[int, int]]:
    """Node and place of each rank; they follow from the order of ranks in a group, which torch sorts."""
    rows, columns = mesh.tolist(), mesh.T.tolist()
    return {
        rank: (sorted(column).index(rank), sorted(row).index(rank))
        for row in rows
        for rank, column in zip(row, columns, strict=True)
    }


def _own(
    group: dist.ProcessGroup, device_type: str, timeout: timedelta | None
) -> dist.ProcessGroup:
    """The lanes' group over the ranks of a group of the mesh ([Note: groups of our own])."""
    if dist.get_world_size(group) == 1 or are_on_stream(device_type, group):
        return group
    return group_of(dist.get_process_group_ranks(group), timeout, cpu_backend())
