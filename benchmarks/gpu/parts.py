"""The parts of `make gpu`, the most important first: the last parts are lost if time runs out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPart:
    """One part, which runs in processes of its own.

    runs: the function of `benchmarks.gpu.workers` that runs it, "module.function", and `arguments` for it.
    Only this module is imported, so what one part lacks stops no other part.
    weight: its share of the time left when it starts, relative to the weights of the parts still to come.
    No weight is small: merely starting Python with torch can take 20 s on a machine that has just started.
    ranks: its processes, all on the first GPU; if it needs several GPUs (`cards`), one for each GPU, an even
    number of them and at most `ranks`.
    tries_again: if it fails, run it once more the plain way: no Inductor, one kernel at a time.
    environment: variables for its processes, besides those of this process.
    """

    name: str
    title: str
    weight: int
    runs: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    cards: int = 1
    tries_again: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def _steps(system: str, mode: str, title: str, *, weight: int) -> GpuPart:
    return GpuPart(
        name=f"{system}-{mode}",
        runs="training.train",
        arguments=(system, mode),
        title=title,
        weight=weight,
        tries_again=system in ("fcdp", "segments"),
    )


def _parity(
    name: str, group: str, cases: str, title: str, *, weight: int, ranks: int = 4, cards: int = 1
) -> GpuPart:
    return GpuPart(
        name=name,
        runs="parity.parity",
        arguments=(group, cases),
        title=title,
        weight=weight,
        ranks=ranks,
        cards=cards,
        tries_again=True,
    )


PARTS = (
    GpuPart(
        name="copies",
        runs="copies.copies",
        title="copies of the pinned pool against cudaMemcpy",
        weight=6,
    ),
    GpuPart(
        name="lanes",
        runs="lane_runs.lane_runs",
        title="lanes and collectives in an NCCL group of one rank, called directly",
        weight=7,
        tries_again=True,
    ),
    _parity(
        "parity-eager",
        "gloo",
        "eager",
        "parity of four Gloo ranks on one card, without Inductor",
        weight=10,
    ),
    _parity(
        "nccl",
        "nccl",
        "all",
        "parity of two nodes over NCCL, one rank on each of several cards",
        weight=16,
        ranks=8,
        cards=2,
    ),
    _steps("fcdp", "full", "steps of a large model: fcdp, weights in host memory", weight=16),
    _steps("fsdp2", "full", "the same: FSDP2", weight=6),
    _steps("plain", "full", "the same: no sharding, compiled by blocks", weight=6),
    _parity(
        "parity",
        "gloo",
        "inductor",
        "parity of four Gloo ranks on one card, with Inductor",
        weight=14,
    ),
    GpuPart(
        name="tests",
        runs="cuda_tests.cuda_tests",
        title="the tests that need a CUDA device",
        weight=7,
    ),
    GpuPart(
        name="sanitizer",
        runs="watched.sanitizer",
        title="steps under torch's CUDA sanitizer",
        weight=6,
    ),
    GpuPart(
        name="streams",
        runs="watched.streams",
        title="steps on a device that checks the order of its streams",
        weight=6,
        tries_again=True,
    ),
    _steps("fcdp", "lora", "LoRA: fcdp, weights in host memory", weight=12),
    _steps("plain", "lora", "LoRA: no sharding, compiled by blocks", weight=5),
    _steps("segments", "full", "the large model: no sharding, fcdp's segments", weight=8),
    _steps(
        "megatron", "full", "the large model: megatron-fsdp, optimizer over all ranks", weight=6
    ),
)
