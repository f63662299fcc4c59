"""Training with fcdp."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import fcdp_compile
from benchmarks.systems.model import Gpt
from benchmarks.systems.train_torch import TorchTrainer
from benchmarks.systems.trainer import ParametersOnHost, RankOfNodes
from fcdp_compile.sharding.shard import state_of

STRATEGIES = {
    "fcdp": "fcdp",
    "fcdp-mics": "mics",
    "fcdp-w8g4": "fcdp+w8+g4",
    "fcdp-zero2": "zero2",
    "fcdp-zero3": "zero3",
}
"""The strategy of each system, by the system's name."""


class FcdpTrainer(TorchTrainer):
    """The plain loop around a sharded and compiled model."""

    def __init__(self, sharded: nn.Module, options: Mapping[str, Any] | None = None) -> None:
        compiled = torch.compile(sharded, backend="fcdp", options=dict(options or {}))
        super().__init__(compiled, list(sharded.parameters()))
        self._sharded = sharded

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else fcdp_compile.no_sync(self._sharded)

    def host_memory(self) -> ParametersOnHost:
        return ParametersOnHost(mapped_bytes=state_of(self._sharded).pool.slab_bytes)


def make_trainer(name: str, model: Gpt, place: RankOfNodes) -> FcdpTrainer:
    """Shard and compile the model with the strategy of the named system."""
    mesh = fcdp_compile.make_mesh(nodes=place.nodes)
    return FcdpTrainer(fcdp_compile.shard(model, mesh, strategy=STRATEGIES[name]))
