"""How many nodes a job has, and how its ranks share work within a node: the same on all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch.distributed as dist

from fcdp_compile.core.ranks.messages import first_other
from fcdp_compile.errors import ArgumentError


def agreed_nodes(world: int, nodes: int | None, pp: int, inner: Mapping[str, int]) -> int:
    """The number of nodes, after a check that every rank counts the same.

    Machines may have started different numbers of ranks, or may have been given different numbers of nodes.
    If one rank went on or left by itself, the others would wait for it.

    pp: how many stages the nodes, or the ranks of a single node, are divided into.
    inner: the sizes of the dimensions within a node, by name.
    """
    try:
        count = _count_nodes(world, nodes)
        _check_inner(inner, _per_stage(pp, count, world // count))
        mine: dict[str, int] | str = {"nodes": count, "pp": pp, **inner}
    except ValueError as error:
        mine = str(error)
    everyone: list[dict[str, int] | str] = [mine] * world
    if world > 1 and dist.get_backend() != "fake":  # a fake group has no other ranks
        dist.all_gather_object(everyone, mine)
    for found in everyone:
        if isinstance(found, str):
            raise ArgumentError(found)
    counts = [found for found in everyone if not isinstance(found, str)]
    if other := first_other(counts):
        first, its = counts[0], counts[other]
        name = next(n for n in first if first[n] != its[n])
        if name == "nodes":
            raise ArgumentError(
                f"rank 0 makes {first[name]} nodes of {world} ranks and rank {other} makes {its[name]}; "
                "start the same number of ranks on every node, or pass the same nodes=… on all"
            )
        raise ArgumentError(
            f"rank 0 has {name}={first[name]} and rank {other} has {name}={its[name]}; pass one {name}=… on "
            "all ranks"
        )
    return count


def _per_stage(pp: int, nodes: int, ranks_per_node: int) -> int:
    """The ranks of each node of a stage.  Raises: ArgumentError."""
    cut, what = (ranks_per_node, "ranks of a node") if nodes == 1 else (nodes, "nodes")
    if isinstance(pp, bool) or not isinstance(pp, int) or pp < 1 or cut % pp:
        raise ArgumentError(
            f"pp={pp!r} must be a whole number that divides the {cut} {what}, because each stage has equally "
            "many; pass another pp=…"
        )
    return ranks_per_node // pp if nodes == 1 else ranks_per_node


def _check_inner(inner: Mapping[str, int], ranks_per_node: int) -> None:
    left, taken = ranks_per_node, ""
    for name, size in inner.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or left % size:
            raise ArgumentError(
                f"{name}={size!r} must be a whole number that divides the {left} ranks of a node{taken}, "
                "because ranks that share sequences or parameters must be on one node; pass another "
                f"{name}=…"
            )
        if size > 1:
            left, taken = left // size, f" with {name}={size} that are left"


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
