"""The parts of `make gpu`, the most important first: the last parts are lost if time runs out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPart:
    """One part, which runs in processes of its own.

    weight: its share of the time left when it starts, relative to the weights of the parts still to come.
    No weight is small: merely starting Python with torch can take 20 s on a machine that has just started.
    environment: variables for its processes, besides those of this process.
    """

    name: str
    title: str
    weight: int
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


PARTS = (
    GpuPart(name="copies", title="copies of the pinned pool against cudaMemcpy", weight=6),
    GpuPart(
        name="lanes",
        title="lanes and collectives in an NCCL group of one rank, called directly",
        weight=7,
    ),
    GpuPart(
        name="fcdp-full", title="steps of a large model: fcdp, weights in host memory", weight=16
    ),
    GpuPart(name="fsdp2-full", title="the same: FSDP2", weight=6),
    GpuPart(name="plain-full", title="the same: no sharding, compiled by blocks", weight=6),
    GpuPart(
        name="parity",
        title="parity of four Gloo ranks on one card, checkpointing and dropout",
        weight=14,
        ranks=4,
    ),
    GpuPart(name="tests", title="the tests that need a CUDA device", weight=7),
    GpuPart(name="sanitizer", title="steps under torch's CUDA sanitizer", weight=6),
    GpuPart(
        name="streams",
        title="steps with FCDP_CHECK_STREAMS=1",
        weight=6,
        environment={"FCDP_CHECK_STREAMS": "1"},
    ),
    GpuPart(name="fcdp-lora", title="LoRA: fcdp, weights in host memory", weight=12),
    GpuPart(name="plain-lora", title="LoRA: no sharding, compiled by blocks", weight=5),
    GpuPart(name="segments-full", title="the large model: no sharding, fcdp's segments", weight=8),
    GpuPart(
        name="megatron-full",
        title="the large model: megatron-fsdp, optimizer over all ranks",
        weight=6,
    ),
)
