"""Training with fcdp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import fcdp_compile
from benchmarks.systems.model import Gpt
from benchmarks.systems.names import BY_NAME
from benchmarks.systems.train_torch import TorchTrainer, make_adamw, make_muon
from benchmarks.systems.trainer import HostMemoryUse, RankOfNodes
from fcdp_compile.core.sharding.shard import state_of

STRATEGIES = {
    "fcdp": "fcdp",
    "fcdp-bf16": "fcdp",
    "fcdp-delta": "fcdp+delta",
    "fcdp-delta-g4": "fcdp+delta+g4",
    "fcdp-mics": "mics",
    "fcdp-muon": "fcdp+matrix",
    "fcdp-w8g4": "fcdp+w8+g4",
    "fcdp-zero2": "zero2",
    "fcdp-zero3": "zero3",
}
"""The strategy of each system, by the system's name; of systems without one here, fcdp."""

BREAKS = {"fcdp-break-1": 1, "fcdp-break-3": 3}
"""How often each system's graph breaks."""


STEPS_ON = {"fcdp-states-gpu": "gpu", "fcdp-states-cpu": "cpu"}
"""Where the optimizer of each system steps whose states are on the host."""


class FcdpTrainer(TorchTrainer):
    """The plain loop around a sharded and compiled model."""

    def __init__(
        self,
        sharded: nn.Module,
        options: Mapping[str, Any] | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """optimizer: instead of AdamW."""
        compiled: Any = torch.compile(sharded, backend="fcdp", options=dict(options or {}))
        super().__init__(compiled, list(sharded.parameters()), optimizer)
        self._sharded = sharded

    def accumulating(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else fcdp_compile.no_sync(self._sharded)

    def host_memory(self) -> HostMemoryUse:
        state = state_of(self._sharded)
        # Home shards on the host, their gradients and two moments.
        offloaded = 4 * sum(
            r.spec.home_bytes for r in state.records.values() if r.spec.computes_on is not None
        )
        return HostMemoryUse(mapped_bytes=state.pool.slab_bytes, heap_bytes=offloaded)


def make_trainer(name: str, model: Gpt, place: RankOfNodes) -> FcdpTrainer:
    """Shard and compile the model with the strategy of the named system."""
    mesh = fcdp_compile.make_mesh(nodes=place.nodes)
    blocks = list(model.blocks)
    sharded = fcdp_compile.shard(
        model,
        mesh,
        strategy=STRATEGIES.get(name, "fcdp"),
        param_dtype=torch.bfloat16 if BY_NAME[name].in_bf16 else None,
        offload_params=name == "fcdp-params-host",
        layers="shared" if name == "fcdp-layers" else "inline",
    )
    if name == "fcdp-muon":
        return FcdpTrainer(sharded, optimizer=make_muon(fcdp_compile.Muon, model))
    if name in STEPS_ON:
        adamw = make_adamw(list(sharded.parameters()))
        offloaded = fcdp_compile.offload(adamw, step_on=STEPS_ON[name])
        return FcdpTrainer(sharded, optimizer=offloaded)
    for block in breaks_after(name, blocks):
        block.register_forward_hook(_break)
    return FcdpTrainer(sharded)


def breaks_after(name: str, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks after which the graph of the named system breaks, evenly spread."""
    breaks = len(blocks) if name == "fcdp-break-all" else BREAKS.get(name, 0)
    parts = min(breaks + 1, len(blocks))
    return [blocks[i * len(blocks) // parts - 1] for i in range(1, breaks + 1)]


@torch.compiler.disable
def _break(module: nn.Module, args: Any, output: Any) -> None:
    """A hook that Dynamo may not trace."""
