"""What benchmarks/gpu_overlap.py finds out about one GPU, as data, and its file; no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.machine import Machine
from benchmarks.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Seconds of copies of `copied_bytes` between host and device, our pool's and plain ones in turn.

    pool_*: `PinnedPool` slabs by `Tensor.copy_`.  plain_*: memory from cudaHostAlloc by cudaMemcpy.
    """

    copied_bytes: int
    pool_h2d_s: list[float]
    plain_h2d_s: list[float]
    pool_d2h_s: list[float]
    plain_d2h_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds of LoRA steps with the frozen weights in host memory, and with all on the device, in turn.

    host_bytes: kept by one rank.  cached_peak_bytes: of the device's memory on one rank, cached.
    has_trace: whether a profiler trace with ranges of ours was written.
    """

    shape: Shape
    dtype: str
    ranks: int
    frozen_bytes: int
    host_bytes: int
    cached_s: list[float]
    resident_s: list[float]
    cached_peak_bytes: int
    has_trace: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp2Peak:
    """Peak of the device's memory on one rank of FSDP2, the same model and batch, as many ranks."""

    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Losses and traffic of four ranks on one device.

    losses, ddp_losses: mean over the ranks after each step.  traffic: "link kind" and the bytes that one rank
    moved in the last step.
    """

    mode: str
    losses: list[float]
    ddp_losses: list[float]
    traffic: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRun:
    """Everything one run found.  device: the GPU's name, or "cpu" where the script was only tried out.

    parity: on the device; cpu_parity: the same on the CPU; one for each mode.
    """

    device: str
    date: str
    machine: Machine
    copies: Copies
    steps: Steps
    fsdp2: Fsdp2Peak
    parity: list[Parity]
    cpu_parity: list[Parity]

    def to_json(self) -> str:
        """Write it down."""
        return json.dumps(asdict(self), indent=1) + "\n"


Part = Copies | Steps | Fsdp2Peak | Parity
P = TypeVar("P", Copies, Steps, Fsdp2Peak, Parity)


def read_part(path: Path, kind: type[P]) -> P:
    """What a worker wrote with `write_part`."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if "shape" in data:
        data["shape"] = Shape(**data["shape"])
    return kind(**data)


def write_part(path: Path, part: Part) -> None:
    """Hand a part from a worker to the driver."""
    path.write_text(json.dumps(asdict(part)), encoding="utf-8")
