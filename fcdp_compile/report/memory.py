"""The memory of a sharded model: predicted and measured on the device, held on the host."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fcdp_compile.sharding.shard import state_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of this rank, on the device unless named otherwise.

    predicted_peak_bytes: the highest peak of the plans, alone and as one step, with the tiers that they
    chose; None before the first is compiled.  measured_peak_bytes: the most that this process ever
    allocated, also for other uses (as torch counts it); None on a CPU, where nothing counts it.
    fallbacks: buckets planned for the device that are on the host because the device was too full.
    host_bytes: of host memory: cached node shards, waiting gradients, states of `offload`, and home shards of
    offloaded parameters.
    """

    predicted_peak_bytes: int | None
    measured_peak_bytes: int | None
    fallbacks: int
    host_bytes: int


def memory(model: nn.Module) -> Memory:
    """The memory of `model`, compiled or not, on this rank.

    Raises: ValueError if the model is not sharded.
    """
    state = state_of(model)
    return Memory(
        predicted_peak_bytes=state.predicted_peak_bytes,
        measured_peak_bytes=state.device.peak_bytes(),
        fallbacks=sum(cache.has_fallen_back for cache in state.buckets.caches()),
        host_bytes=state.pool.slab_bytes + state.host_memory.home_bytes,
    )
