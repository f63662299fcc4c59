"""How many different segments a model has: as many with many layers as with a few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
import fcdp_compile.compute
from fcdp_compile import torch_compat
from tests.distributed.parity import fresh
from tests.distributed.ranks import run

WIDTH, HEADS, VOCABULARY = 8, 2, 11


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.mix(self.norms[0](x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))


class Model(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(dropout) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _count(
    mesh: DeviceMesh | None, layers: int, dropout: float, strategy: str, layers_in_a_bucket: float
) -> tuple[int, int]:
    """Train a step; how many segments were compiled, and how many there are."""
    fresh()
    compiled: list[int] = []
    asked: list[int] = []
    compile_segment, of_any = (
        torch_compat.compile_with_inductor,
        fcdp_compile.compute.Compute.compile,
    )

    def instead(gm: Any, inputs: Any, settings: Any) -> Any:
        compiled.append(len(gm.graph.nodes))
        return torch_compat.boxed(gm)  # it is counted, not timed

    def counted(self: Any, gm: Any) -> Any:
        asked.append(1)
        return of_any(self, gm)

    torch_compat.compile_with_inductor = instead
    fcdp_compile.compute.Compute.compile = counted  # type: ignore[method-assign]
    try:
        model = Model(layers, dropout)
        layer_bytes = sum(p.numel() for p in model.layers[0].parameters()) * 4
        fcdp_compile.shard(model, mesh, strategy=strategy)
        bucket_mb = layers_in_a_bucket * layer_bytes / 2**20
        options = {"compute": "inductor", "bucket_mb": bucket_mb}
        net = torch.compile(model, backend="fcdp", fullgraph=True, options=options)
        net(torch.zeros(2, 5, dtype=torch.int64)).sum().backward()
    finally:
        torch_compat.compile_with_inductor = compile_segment
        fcdp_compile.compute.Compute.compile = of_any  # type: ignore[method-assign]
    return len(compiled), len(asked)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_alone(dropout: float) -> None:
    few, _ = _count(None, 6, dropout, "fcdp", 1.0)
    many, segments = _count(None, 40, dropout, "fcdp", 1.0)
    assert many <= few
    assert segments > 70  # a forward and a backward of each layer


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "dropout", "layers_in_a_bucket"),
    [("fcdp", 0.1, 1.1), ("zero3", 0.0, 0.6)],
)
def test_on_several_ranks(strategy: str, dropout: float, layers_in_a_bucket: float) -> None:
    settings = (dropout, strategy, layers_in_a_bucket)
    few = run(_count, 6, *settings, nodes=2, ranks_per_node=1)
    many = run(_count, 12, *settings, nodes=2, ranks_per_node=1)
    assert many[0][0] <= few[0][0], f"{many[0]} against {few[0]}"
    assert many[0][1] > 2 * 12
