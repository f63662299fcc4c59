"""A placement that torch lacks; DTensor calls its methods by these names (torch 2.12 to 2.15)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fcdp_compile.errors import FcdpError


class NodeShard(Shard):
    """A `Shard` of which one index of the mesh dimension owns all rows, and the other indices own none.

    dim: the tensor's sharded dimension.  node: the index that owns the rows.
    """

    def __new__(cls, dim: int, node: int) -> NodeShard:
        """Torch's base class takes only the dimension."""
        made: NodeShard = super().__new__(cls, dim)  # type: ignore[call-arg]
        return made

    def __init__(self, dim: int, node: int) -> None:
        super().__init__(dim)
        self.node = node

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeShard) and (self.dim, self.node) == (other.dim, other.node)

    def __ne__(self, other: object) -> bool:
        # A DTensor's spec insists that each placement in its order of shards is not != Shard(dim).
        return not (self == other or (type(other) is Shard and other.dim == self.dim))

    def __hash__(self) -> int:
        return hash((self.dim, self.node))

    def __repr__(self) -> str:
        return f"NodeShard(dim={self.dim}, node={self.node})"

    def __str__(self) -> str:
        return f"S({self.dim}, node {self.node})"

    def __reduce__(self) -> Any:
        return NodeShard, (self.dim, self.node)

    def rows_at(self, rows: int, index: int) -> tuple[int, int]:
        """The first row and the number of rows that an index of the mesh dimension owns."""
        return (0, rows) if index == self.node else (0 if index < self.node else rows, 0)

    def _local_shard_size_and_offset(
        self, curr_local_size: int, num_chunks: int, rank: Any
    ) -> tuple[int, int]:
        first, rows = self.rows_at(curr_local_size, rank)
        return rows, first

    def _to_replicate_tensor(  # type: ignore[override]
        self,
        local_tensor: Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[int],
    ) -> Tensor:
        whole = local_tensor.new_empty(tuple(current_logical_shape))
        if mesh.get_local_rank(mesh_dim) == self.node:
            whole.copy_(local_tensor)
        dist.broadcast(whole, group=mesh.get_group(mesh_dim), group_src=self.node)
        return whole

    def _replicate_to_shard(
        self, local_tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: Any
    ) -> Tensor:
        first, rows = self.rows_at(local_tensor.shape[self.dim], shard_index)
        return local_tensor.narrow(self.dim, first, rows).clone()


class _MatricesShard(_StridedShard):
    """Torch's strided shard, which nobody may take for one run of rows.

    `torch.distributed.checkpoint` and state dicts that rank 0 broadcasts take the first row of a rank's part
    and the part's size, and so would copy other rows than the part has.
    """

    def _local_shard_size_and_offset(self, *args: Any, **more: Any) -> Any:
        # A mode since torch 2.13, a flag before.
        wants_all = more.get("offset_mode") == 1 or more.get("return_first_offset") is False
        if wants_all:
            raise FcdpError(
                "ranks share this parameter by parts of several matrices, which torch.distributed.checkpoint "
                "and broadcast_from_rank0 would mix up; use fcdp_compile.save and load, or full state dicts "
                "on all ranks"
            )
        return super()._local_shard_size_and_offset(*args, **more)


def one_run_only(placement: Placement) -> Placement:
    """The placement; torch then raises where it would take parts of several matrices for one run of rows."""
    if type(placement) is not _StridedShard:
        return placement
    return _MatricesShard(placement.dim, split_factor=placement.split_factor)


def matrices_in(placement: Placement) -> int:
    """How many matrices that lie one after the other a placement cuts, each over all ranks; mostly 1.

    torch's strided shard: with 2, a rank has a part of the first half of the rows and one of the second half.
    """
    return int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
