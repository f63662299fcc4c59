"""How many nodes a job has, and how many of a node's ranks share a sequence: the same on all ranks."""

from __future__ import annotations

import os

import torch.distributed as dist

from fcdp_compile.errors import ArgumentError
from fcdp_compile.ranks.differences import first_other


def agreed_nodes(world: int, nodes: int | None, cp: int) -> int:
    """The number of nodes, after a check that every rank counts the same.

    Machines may have started different numbers of ranks, or may have been given different numbers of nodes.
    If one rank went on or left by itself, the others would wait for it.
    """
    try:
        count = _count_nodes(world, nodes)
        _check_cp(cp, world // count)
        mine: tuple[int, int] | str = (count, cp)
    except ValueError as error:
        mine = str(error)
    everyone: list[tuple[int, int] | str] = [mine] * world
    if world > 1 and dist.get_backend() != "fake":  # a fake group has no other ranks
        dist.all_gather_object(everyone, mine)
    for found in everyone:
        if isinstance(found, str):
            raise ArgumentError(found)
    if other := first_other(everyone):
        (first, first_cp), (its, its_cp) = (tuple(everyone[i]) for i in (0, other))
        if first == its:
            raise ArgumentError(
                f"rank 0 has cp={first_cp} and rank {other} has cp={its_cp}; pass the same cp=… on all ranks"
            )
        raise ArgumentError(
            f"rank 0 makes {first} nodes of {world} ranks and rank {other} makes {its}; start "
            "the same number of ranks on every node, or pass the same nodes=… on all"
        )
    return count


def _check_cp(cp: int, ranks_per_node: int) -> None:
    if isinstance(cp, bool) or not isinstance(cp, int) or cp < 1 or ranks_per_node % cp:
        raise ArgumentError(
            f"cp={cp!r} must be a whole number that divides the {ranks_per_node} ranks of a node, because "
            "ranks that share a sequence must be on one node; pass another cp=…"
        )


def _count_nodes(world: int, nodes: int | None) -> int:
    if nodes is not None:
        if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
            raise ArgumentError(f"nodes must be a positive whole number, not {nodes!r}")
        if world % nodes:
            raise ArgumentError(
                f"world size {world} cannot be split into {nodes} nodes; "
                f"pass nodes=… so that it divides {world}"
            )
        return nodes
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % per_node:
        raise ArgumentError(
            f"world size {world} cannot be split into nodes of {per_node} ranks (LOCAL_WORLD_SIZE); "
            f"start the same number of ranks on every node or pass nodes=… so that it divides {world}"
        )
    return world // per_node
