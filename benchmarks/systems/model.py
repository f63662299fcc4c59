"""The model and the data of the benchmark: a small GPT, LoRA on its attention, random tokens.

Weights and batches are drawn from seeds: weights are equal on every rank, and both are equal in all systems.
There is no dropout, so losses can be compared between systems.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.systems.shape import Shape

LORA_RANK = 8
LORA_SCALE = 2.0


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank product beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, LORA_RANK, bias=False)
        self.up = nn.Linear(LORA_RANK, base.out_features, bias=False)
        # Zero is usual, but would train only half of the adapter in the first step, and a wrong gradient of
        # the other half would not show in the loss.
        nn.init.normal_(self.up.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + LORA_SCALE * self.up(self.down(x))
        return out


class GptBlock(nn.Module):
    """Attention and MLP, pre-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.proj: nn.Module = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.norm1(x))
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Gpt(nn.Module):
    """A GPT whose forward returns the loss; ids have shape [batch, length + 1]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.ModuleList(GptBlock(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        inputs, labels = ids[:, :-1], ids[:, 1:]
        places = torch.arange(inputs.shape[1], device=ids.device)
        x = self.tokens(inputs) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.loss_of(x, labels)

    def loss_of(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss from the last block's output; systems that compile by blocks compile this, too."""
        logits = self.head(self.norm(x))
        loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return loss


def make_model(shape: Shape, mode: str) -> Gpt:
    """Make the model of a mode, "full" or "lora"; its weights depend on nothing but shape and mode."""
    torch.manual_seed(0)
    model = Gpt(shape)
    if mode == "lora":
        model.requires_grad_(False)
        for block in model.blocks:
            for name in ("qkv", "proj"):
                setattr(block, name, LoraLinear(getattr(block, name)))
    return model


def make_batch(shape: Shape, *, rank: int, number: int) -> Tensor:
    """Return the ids [batch, length + 1] of the micro-batch `number` of one rank."""
    generator = torch.Generator().manual_seed(1 + 10_000 * number + rank)
    size = (shape.batch, shape.length + 1)
    return torch.randint(0, shape.vocabulary, size, generator=generator)
