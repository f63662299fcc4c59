"""The parts of `make gpu` in the order of their worth: what is lost if time runs out comes last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part, which runs in processes of its own.

    weight: its share of the time that is left when it starts, among the parts still to come.
    environment: of its processes, besides this one's.
    """

    name: str
    title: str
    weight: int
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


PARTS = (
    Part(name="copies", title="Copies", weight=2),
    Part(name="lanes", title="Lanes and collectives, a group of one rank", weight=3),
    Part(name="fcdp-full", title="fcdp, all trained, weights in host memory", weight=11),
    Part(name="fsdp2-full", title="FSDP2, all trained", weight=5),
    Part(name="plain-full", title="compiled, one GPU holds all", weight=5),
    Part(name="parity", title="Parity of four ranks on one device", weight=12, ranks=4),
    Part(name="tests", title="Tests that need a CUDA device", weight=6),
    Part(name="sanitizer", title="CUDA sanitizer", weight=4),
    Part(
        name="streams",
        title="FCDP_CHECK_STREAMS=1",
        weight=4,
        environment={"FCDP_CHECK_STREAMS": "1"},
    ),
    Part(name="fcdp-lora", title="fcdp, LoRA, weights in host memory", weight=9),
    Part(name="plain-lora", title="compiled, LoRA, one GPU holds all", weight=4),
    Part(name="segments-full", title="fcdp's segments, one GPU holds all", weight=6),
    Part(name="megatron-full", title="megatron-fsdp, optimizer over all ranks", weight=4),
)
