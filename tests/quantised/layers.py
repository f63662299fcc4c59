"""Layers that bitsandbytes and torchao have quantised, and a small model around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.device.choice import seeded

WIDTH = 128


def four_bit(quant_type: str, *, nested: bool) -> nn.Module:
    import bitsandbytes  # a test that needs the library skips without it

    layer = bitsandbytes.nn.Linear4bit(
        WIDTH,
        WIDTH,
        quant_type=quant_type,
        compute_dtype=torch.float32,
        compress_statistics=nested,
    )
    return layer.requires_grad_(False).to("cpu")


def eight_bit() -> nn.Module:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    return layer.requires_grad_(False).to("cpu")


def torchao(config: str) -> nn.Module:
    import torchao.quantization as quantization

    layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    quantization.quantize_(layer, getattr(quantization, config)())
    return layer


class Computed(nn.Linear):
    """A layer whose weight has no linear kernel of its own: it computes with the dequantised weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.dequantize(torch.float32), self.bias)


def microscaled(dtype: torch.dtype) -> nn.Module:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    layer = Computed(WIDTH, WIDTH).requires_grad_(False)
    layer.weight = nn.Parameter(MXTensor.to_mx(layer.weight, dtype, 32), requires_grad=False)
    return layer


class Nf4(nn.Linear):
    """torchao's NF4, which multiplies in bf16 by a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

        return nf4_tensor.linear_nf4(x, self.weight) + self.bias


def nf4() -> nn.Module:
    from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

    layer = Nf4(WIDTH, WIDTH).requires_grad_(False)
    layer.weight = nn.Parameter(nf4_tensor.to_nf4(layer.weight.detach()), requires_grad=False)
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "nf4": lambda: four_bit("nf4", nested=False),
    "nf4-nested": lambda: four_bit("nf4", nested=True),
    "fp4": lambda: four_bit("fp4", nested=False),
    "int8": eight_bit,
    "torchao-int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao-float8": lambda: torchao("Float8WeightOnlyConfig"),
    "torchao-nf4": nf4,
    "torchao-mx8": lambda: microscaled(torch.float8_e4m3fn),
    "torchao-mx4": lambda: microscaled(torch.float4_e2m1fn_x2),
}
"""A quantised linear layer with a plain bias, by format."""


class Adapted(nn.Module):
    """A quantised layer with an adapter beside it.

    checkpointed: whether its backward computes its forward again.
    """

    def __init__(self, base: nn.Module, *, checkpointed: bool) -> None:
        super().__init__()
        self.base, self.checkpointed = base, checkpointed
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def _run(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed:
            return checkpoint(self._run, x, use_reentrant=False)
        return self._run(x)


def adapted(kind: str, *, checkpointed: bool = False, layers: int = 2) -> nn.Module:
    """A model of quantised layers with adapters; the same values for every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(Adapted(LAYERS[kind](), checkpointed=checkpointed) for _ in range(layers))
    )


def loss_of(model: nn.Module, step: int, rank: int = 0, world: int = 1) -> Tensor:
    """The loss of this rank's part of a step's batch."""
    batch = torch.randn(4 * world, WIDTH, generator=seeded(step))
    loss: Tensor = (model(batch[4 * rank : 4 * rank + 4]) ** 2).mean()
    return loss
