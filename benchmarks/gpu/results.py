"""The findings of the parts as data, and their files; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.running.machine import MachineRecord
from benchmarks.systems.shape import Shape
from fcdp_compile.models.files.aside import written_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTests:
    """Results of the tests that need a CUDA device.  failures: one line for each failed test."""

    passed: int
    failed: int
    skipped: int
    failures: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Seconds of copies of `copied_bytes` between host and device, from our pool and plain ones in turn.

    pool_*: `PinnedPool` slabs, copied by `Tensor.copy_`.  plain_*: memory from cudaHostAlloc, copied by
    cudaMemcpy.  is_pinned: whether CUDA could register the slab; None if this device cannot register memory.
    """

    copied_bytes: int
    is_pinned: bool | None
    pool_h2d_s: list[float]
    plain_h2d_s: list[float]
    pool_d2h_s: list[float]
    plain_d2h_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRun:
    """One kind of task on a lane, and whether its result is right.

    issue_us: the Python thread's time to start the task, the median of many.
    """

    name: str
    is_right: bool
    issue_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRuns:
    """Transfers and collectives on lanes, one after the other.  backend: of the group of one rank."""

    backend: str
    is_blocking: bool
    runs: list[LaneRun]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """Ranks of two nodes, compared with each rank's own copy of the model.

    device_memory: the option, empty for the default.  is_checkpointed: with activation checkpointing and
    dropout.  losses, plain_losses: mean over the ranks, by step.  parameters_off: the largest difference of a
    parameter after the last step, relative to the largest value of its tensor.  host_bytes: in slabs of one
    rank.  traffic: bytes that one rank moved in the last step, by "link kind".  unplanned: which of them are
    not those of the plan.
    """

    mode: str
    strategy: str
    dtype: str
    compute: str
    device_memory: str
    is_checkpointed: bool
    losses: list[float]
    plain_losses: list[float]
    parameters_off: float
    host_bytes: int
    traffic: dict[str, int]
    unplanned: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The cases that there was time for, of `planned` cases.  missing: packages that QLoRA lacks."""

    planned: int
    cases: list[ParityCase]
    missing: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """The idle times of the compute stream in the traced steps.

    forward_start_us: by step, the time between the first kernel of the forward and the end of the kernels
    before it.  idle_part: a share of the time from the first kernel to the last.  kernels: number on the
    compute stream.
    """

    forward_start_us: list[float]
    idle_part: float
    kernels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Steps of one system on one rank; the group has nodes x ranks_per_node ranks, but only this one exists.

    parameter_bytes: of the whole model.  first_step_s: with compilation.  peak_bytes: peak of the device's
    memory in the timed steps.  passes_peak_bytes: peak in a forward and backward, without the optimizer.
    predicted_peak_bytes: the plan's prediction.  host_bytes: in slabs.  host_buckets, device_buckets: numbers
    of buckets that the plan keeps there.  gaps: None without a trace.
    """

    system: str
    mode: str
    shape: Shape
    dtype: str
    nodes: int
    ranks_per_node: int
    parameter_bytes: int
    first_step_s: float
    step_s: list[float]
    losses: list[float]
    peak_bytes: int
    passes_peak_bytes: int
    predicted_peak_bytes: int | None = None
    host_bytes: int = 0
    host_buckets: int = 0
    device_buckets: int = 0
    gaps: Gaps | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Steps under a checker, which found no fault in them.

    by: the checker's name.  finds_planted: whether the checker finds a fault made on purpose; None if no
    fault was made.
    """

    by: str
    steps: int
    finds_planted: bool | None


Found = CudaTests | Copies | LaneRuns | Parity | Trained | Watched


class Ending(Enum):
    """How a part ended."""

    DONE = "done"
    FAILED = "failed"
    TIMEOUT = "out of time"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one part.

    reason: a sentence if the part is not done.  again: how it ended when it ran again the plain way, empty if
    it did not.  printed: the last lines that the part printed.  found: the last findings that the part wrote
    before it ended.
    """

    part: str
    state: Ending
    reason: str
    again: str
    elapsed_s: float
    limit_s: float
    date: str
    device: str
    machine: MachineRecord
    printed: list[str]
    found: Found | None


def write_found(path: Path, found: Found) -> None:
    """Hand a worker's findings so far to the driver; the file is replaced at once, so none is read half."""
    _replace(path, {"kind": type(found).__name__, **asdict(found)})


def read_found(path: Path) -> Found | None:
    """Read a worker's findings; None if it has written none."""
    return _found(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write the file of a part."""
    data = asdict(outcome)
    if outcome.found is not None:
        data["found"] = {"kind": type(outcome.found).__name__, **asdict(outcome.found)}
    _replace(path, {**data, "state": outcome.state.value})


def read_outcome(path: Path) -> Outcome:
    """Read the file that `write_outcome` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    found = data.pop("found")
    return Outcome(
        **{
            **data,
            "state": Ending(data["state"]),
            "machine": MachineRecord(**data["machine"]),
            "found": None if found is None else _found(found),
        }
    )


_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (CudaTests, Copies, LaneRuns, Parity, Trained, Watched)
}


def _found(data: Mapping[str, Any]) -> Found:
    values = {k: v for k, v in data.items() if k != "kind"}
    if "shape" in values:
        values["shape"] = Shape(**values["shape"])
    if values.get("gaps") is not None:
        values["gaps"] = Gaps(**values["gaps"])
    if "runs" in values:
        values["runs"] = [LaneRun(**run) for run in values["runs"]]
    if "cases" in values:
        values["cases"] = [ParityCase(**case) for case in values["cases"]]
    found: Found = _KINDS[data["kind"]](**values)
    return found


def _replace(path: Path, data: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as aside:
        aside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
