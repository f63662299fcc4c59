"""Quantised base weights for plans: packed parameters as bitsandbytes makes them, without its kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.cluster.plan_request import PackedFormat
from fcdp_compile.errors import FcdpError
from fcdp_compile.quantised.interface import Parts, Recipe
from fcdp_compile.quantised.weight import QuantisedWeight


@torch.library.custom_op("fcdp::dequantise", mutates_args=())
def _dequantise(packed: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """The kernel of a library in a plan's graphs: a weight from its packed values and scales."""
    raise FcdpError(
        "fcdp::dequantise stands for a kernel in a plan; its graphs have no values to run on"
    )


@_dequantise.register_fake
def _fake_dequantise(
    packed: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype
) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class _Dequantised(Recipe):
    """The recipe of a weight that a kernel dequantises at each use."""

    shape: torch.Size
    dtype: torch.dtype
    meaning = "planned"

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        made: Tensor = torch.ops.fcdp.dequantise(
            tensors["packed"], tensors["absmax"], list(self.shape), self.dtype
        )
        return made

    def dequantise(self, weight: Tensor) -> Tensor:
        return weight


class PackedLinear(nn.Module):
    """A linear layer with a quantised weight."""

    def __init__(self, linear: nn.Linear, packing: PackedFormat) -> None:
        super().__init__()
        self.weight = QuantisedWeight(_parts(linear.weight, packing))
        self.bias = linear.bias

    def forward(self, values: Tensor) -> Tensor:
        """The product with the dequantised weight."""
        return nn.functional.linear(values, self.weight.join(), self.bias)


def _parts(weight: Tensor, packing: PackedFormat) -> Parts:
    """The tensors of a quantised weight, cut between blocks where blocks are whole."""
    count, block = weight.numel(), packing.block or weight.shape[1]
    in_bytes = -(-count * packing.bits // 8)
    block_bytes = block * packing.bits // 8
    shape = (in_bytes,) if count % block else (count // block, block_bytes)
    recipe = _Dequantised(shape=weight.shape, dtype=weight.dtype)
    return Parts(
        packed={
            "packed": weight.new_empty(shape, dtype=torch.uint8),
            "absmax": weight.new_empty(-(-count // block), dtype=torch.float32),
        },
        whole={},
        recipe=recipe,
    )


def pack_frozen(model: nn.Module, packing: PackedFormat) -> None:
    """Quantise the frozen linear layers of a model, all but the one of its results, as transformers does."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or child is head:
                continue
            if not child.weight.requires_grad:
                setattr(module, name, PackedLinear(child, packing))
