"""Compare the gradients of a first step between Inductor's and ATen's kernels: how many are bitwise equal.

    [TORCHINDUCTOR_NUMERICS=strict] python -m benchmarks.versions.numerics fp32|bf16

Runs one process on the CPU.  torch knows TORCHINDUCTOR_NUMERICS from 2.14 on.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import fcdp_compile

_WIDTH, _HEADS, _LAYERS, _WORDS = 64, 4, 2, 199
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class NumericsBlock(nn.Module):
    """Attention and two linear layers, each behind a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.first(x)).view(batch, length, 3, _HEADS, _WIDTH // _HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, _WIDTH))
        return x + self.down(gelu(self.up(self.second(x))))


class NumericsGpt(nn.Module):
    """A GPT without positions; its forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.Sequential(*(NumericsBlock() for _ in range(_LAYERS)))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradients(compute: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients of one step, by name."""
    torch.manual_seed(0)
    model = fcdp_compile.shard(NumericsGpt().to(dtype), fcdp_compile.make_mesh())
    tokens = torch.randint(_WORDS, (4, 33))
    torch.compile(model, backend="fcdp", options={"compute": compute})(tokens).backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


def main(dtype: str) -> None:
    """Compare and print one line."""
    eager, compiled = (gradients(compute, _DTYPES[dtype]) for compute in ("eager", "inductor"))
    pairs = [(compiled[name], eager[name]) for name in eager]
    equal = sum(int((a == b).sum()) for a, b in pairs) / sum(b.numel() for _, b in pairs)
    tensors = sum(torch.equal(a, b) for a, b in pairs)
    off = max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs
    )
    print(
        f"torch {torch.__version__}, {dtype}: {equal:.1%} of values and {tensors} of {len(pairs)} "
        f"tensors are bitwise equal; the largest difference is {off:.1e} of a tensor's largest value"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
