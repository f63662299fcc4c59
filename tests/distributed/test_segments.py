"""The number of different segments of a model does not grow with its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
import fcdp_compile.backend.compute
from fcdp_compile.torch_compat import compilers
from fcdp_compile.torch_compat.graphs import boxed
from tests.distributed.layered import Model
from tests.distributed.parity import fresh
from tests.distributed.ranks import run


def _count(
    mesh: DeviceMesh | None, layers: int, dropout: float, strategy: str, layers_in_a_bucket: float
) -> tuple[int, int]:
    """Train a step; returns how many segments were compiled, and how many the model has."""
    fresh()
    compiled: list[int] = []
    asked: list[int] = []
    compile_segment, of_any = (
        compilers.compile_with_inductor,
        fcdp_compile.backend.compute.Compute.compile,
    )

    def instead(gm: Any, inputs: Any, settings: Any) -> Any:
        compiled.append(len(gm.graph.nodes))
        return boxed(gm)  # the count is enough: skip Inductor

    def counted(self: Any, gm: Any) -> Any:
        asked.append(1)
        return of_any(self, gm)

    compilers.compile_with_inductor = instead
    fcdp_compile.backend.compute.Compute.compile = counted  # type: ignore[method-assign]
    try:
        model = Model(layers, dropout)
        layer_bytes = sum(p.numel() for p in model.layers[0].parameters()) * 4
        fcdp_compile.shard(model, mesh, strategy=strategy)
        bucket_mb = layers_in_a_bucket * layer_bytes / 2**20
        options = {"compute": "inductor", "bucket_mb": bucket_mb}
        net = torch.compile(model, backend="fcdp", fullgraph=True, options=options)
        net(torch.zeros(2, 5, dtype=torch.int64)).sum().backward()
    finally:
        compilers.compile_with_inductor = compile_segment
        fcdp_compile.backend.compute.Compute.compile = of_any  # type: ignore[method-assign]
    return len(compiled), len(asked)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.slow
def test_alone(dropout: float) -> None:
    few, _ = _count(None, 6, dropout, "fcdp", 1.0)
    many, segments = _count(None, 20, dropout, "fcdp", 1.0)
    assert many <= few
    assert segments > 35  # a forward and a backward for each layer


@pytest.mark.rare
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
