"""Linear layers that ranks share, on plain tensors.

Transformers' own forwards compute with DTensors.  torch 2.13 cannot trace a linear layer of DTensors if its
input's sizes vary (the sizes of a view in the backward are defined by themselves), and sequences vary.
Source: Megatron-LM (Shoeybi et al., 2019), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.functional import linear

Forward = Callable[[Tensor], Tensor]


def by_columns(module: nn.Linear, mesh: DeviceMesh, *, gathers: bool) -> Forward:
    """The forward of a layer of which each rank has some outputs: [..., in] -> [..., out / t] or [..., out].

    gathers: whether every rank gets all outputs.
    """

    def forward(x: Tensor) -> Tensor:
        whole = _from(x, mesh, Replicate()).redistribute(placements=[Replicate()])
        # Each rank's gradient is only that of its outputs.
        found = linear(whole.to_local(grad_placements=[Partial()]), *_parts(module))
        if not gathers:
            return found
        shape: Any = (*found.shape[:-1], module.out_features)
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            found, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride
        )
        return made.redistribute(placements=[Replicate()]).to_local()

    return forward


def by_rows(module: nn.Linear, mesh: DeviceMesh, *, cuts: bool) -> Forward:
    """The forward of a layer of which each rank has some inputs: [..., in / t] or [..., in] -> [..., out].

    cuts: whether every rank gets all inputs.
    """

    def forward(x: Tensor) -> Tensor:
        if cuts:
            x = _from(x, mesh, Replicate()).redistribute(placements=[Shard(-1)]).to_local()
        weight, bias = _parts(module)
        parts = _from(linear(x, weight), mesh, Partial())
        found = parts.redistribute(placements=[Replicate()]).to_local()
        return found if bias is None else found + bias

    return forward


def _from(x: Tensor, mesh: DeviceMesh, placement: Partial | Replicate) -> DTensor:
    return (
        x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)
    )


def _parts(module: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """This rank's parts of the weight and of the bias."""
    weight, bias = module.weight, module.bias
    parts = [p.to_local() if isinstance(p, DTensor) else p for p in (weight, bias)]
    return parts[0], parts[1]
