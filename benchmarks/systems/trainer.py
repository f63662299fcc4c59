"""The interface between the worker and the systems that train."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

# High enough that a step with LoRA moves the loss by many times `LOSS_TOLERANCE`.
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOfNodes:
    """A rank among N nodes of g ranks."""

    rank: int
    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """G, the number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.ranks_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemoryUse:
    """What one rank would have in host memory if there were an accelerator: parameters, optimizer states.

    heap_bytes: from malloc, as all tensors on a CPU.  mapped_bytes: mapped without malloc.
    """

    heap_bytes: int = 0
    mapped_bytes: int = 0


class SystemTrainer(Protocol):
    """A model wrapped in one system."""

    def micro_batch(self, ids: Tensor, *, is_last: bool, accumulation: int) -> Tensor:
        """Forward and backward of one of `accumulation` micro-batches; returns its loss, detached."""
        ...

    def step(self) -> None:
        """Step the optimizer and clear the gradients."""
        ...

    def host_memory(self) -> HostMemoryUse:
        """Return what is in host memory."""
        ...
