"""The parameter that `shard` leaves in a model: a DTensor that holds this rank's home shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fcdp_compile.layout import ParamLayout


class HomeShard(DTensor):
    """A DTensor parameter whose `.data` can be assigned.

    A plain DTensor takes `p.data = other` without complaint and keeps its old values, silently (torch 2.11
    to 2.13: assignment swaps the outer tensor, which has no storage).  Here `other` may be a DTensor of any
    placements and mesh or a whole tensor of the full shape, of which this rank keeps its part.
    """

    @staticmethod
    def of(
        local: Tensor, layout: ParamLayout, mesh: DeviceMesh, *, requires_grad: bool
    ) -> HomeShard:
        """Wrap this rank's local shard as an `nn.Parameter` of the full shape."""
        shape = torch.Size(layout.shape)
        stride = torch.empty(shape, device="meta").stride()
        dtensor = DTensor.from_local(
            local, mesh, placements_of(layout), run_check=False, shape=shape, stride=stride
        )
        shard = HomeShard._like(dtensor)
        shard.requires_grad_(requires_grad)
        return shard

    @staticmethod
    def _like(dtensor: DTensor) -> HomeShard:
        shard: HomeShard = HomeShard(  # type: ignore[no-untyped-call]
            dtensor._local_tensor, dtensor._spec, requires_grad=dtensor.requires_grad
        )
        shard._is_param = (
            True  # what makes isinstance(shard, nn.Parameter) true for a tensor subclass
        )
        return shard

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any
    ) -> HomeShard:
        # AOTAutograd rebuilds its inputs through this and then insists on the very class it was given.
        return HomeShard._like(
            DTensor.__tensor_unflatten__(inner_tensors, flatten_spec, outer_size, outer_stride)
        )

    @property
    def data(self) -> Tensor:
        """The values without autograd, sharing memory."""
        return DTensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, other: Tensor) -> None:
        if tuple(other.shape) != tuple(self.shape) or other.dtype != self.dtype:
            raise ValueError(
                f"cannot assign {other.dtype} {tuple(other.shape)} to the .data of a sharded parameter of "
                f"{self.dtype} {tuple(self.shape)}; assign a tensor of the same dtype and full shape"
            )
        if isinstance(other, DTensor) and other.device_mesh != self.device_mesh:
            # The same placements on another mesh, such as ("inter", "intra"), are other rows.
            other = other.full_tensor()
        if not isinstance(other, DTensor):
            whole = DTensor.from_local(
                other.detach().to(self._local_tensor.device),
                self.device_mesh,
                [Replicate()] * self.device_mesh.ndim,
                run_check=False,
            )
            other = whole.redistribute(placements=self.placements)
        elif tuple(other.placements) != tuple(self.placements):
            other = other.redistribute(placements=self.placements)
        self._local_tensor = other._local_tensor.detach()


def placements_of(layout: ParamLayout) -> tuple[Shard | Replicate, Shard | Replicate]:
    """DTensor placements on the ("intra", "inter") mesh (`layout`, [Note: chunk order])."""
    if layout.dim is None:
        return (Replicate(), Replicate())
    return (Shard(layout.dim), Shard(layout.dim))
