"""What the parts find, as data, and their files; no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from benchmarks.running.machine import MachineRecord
from benchmarks.systems.shape import Shape
from fcdp_compile.files.aside import written_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTests:
    """How the tests that need a CUDA device ended.  failures: one line for each."""

    passed: int
    failed: int
    skipped: int
    failures: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Seconds of copies of `copied_bytes` between host and device, our pool's and plain ones in turn.

    pool_*: `PinnedPool` slabs by `Tensor.copy_`.  plain_*: memory from cudaHostAlloc by cudaMemcpy.
    is_pinned: whether CUDA could register the slab.
    """

    copied_bytes: int
    is_pinned: bool
    pool_h2d_s: list[float]
    plain_h2d_s: list[float]
    pool_d2h_s: list[float]
    plain_d2h_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRun:
    """One kind of task on a lane: whether its result is right, and what starting it takes.

    issue_us: of the Python thread, the median of many.
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
    """Four ranks on one device against each rank's own copy of the model.

    device_memory: the option, empty for the default.  is_checkpointed: with dropout, too.
    losses, plain_losses: mean over the ranks, step by step.  parameters_off: the largest difference of a
    parameter at last, relative to the largest value of its tensor.  host_bytes: in slabs of one rank.
    traffic: "link kind" and the bytes that one rank moved in the last step.
    """

    mode: str
    compute: str
    device_memory: str
    is_checkpointed: bool
    losses: list[float]
    plain_losses: list[float]
    parameters_off: float
    host_bytes: int
    traffic: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """As many cases as there was time for, of `planned`."""

    planned: int
    cases: list[ParityCase]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Where the compute stream had nothing to do in the traced steps.

    forward_start_us: of each step, between the end of the kernel before and the first one that the forward
    launched.  idle_part: of the time from the first kernel to the last.  kernels: on the compute stream.
    """

    forward_start_us: list[float]
    idle_part: float
    kernels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Steps of one system on one rank of a group of nodes x ranks_per_node, of which only it exists.

    parameter_bytes: of the whole model.  first_step_s: compiling included.  peak_bytes: of the device's
    memory in the steps that were timed; passes_peak_bytes: in a forward and backward, without the optimizer;
    predicted_peak_bytes: what the plan says.  host_bytes: in slabs; host_buckets, device_buckets: where the
    plan keeps them.  gaps: None without a trace.
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
    """Steps under a checker, which found nothing in them.

    by: its name.  finds_planted: whether it finds a fault that is made on purpose; None if none is.
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
    """How one part ended.

    reason: a sentence, where it is not done.  printed: the last lines that it printed.
    found: everything, or as much as it had written by then.
    """

    part: str
    state: Ending
    reason: str
    elapsed_s: float
    limit_s: float
    date: str
    device: str
    machine: MachineRecord
    printed: list[str]
    found: Found | None


def write_found(path: Path, found: Found) -> None:
    """Hand what a worker has found so far to the driver; a reader sees all of it or what was before."""
    _replace(path, {"kind": type(found).__name__, **asdict(found)})


def read_found(path: Path) -> Found | None:
    """What a worker has written; None if it has not."""
    return _found(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Replace the file of a part."""
    data = asdict(outcome)
    if outcome.found is not None:
        data["found"] = {"kind": type(outcome.found).__name__, **asdict(outcome.found)}
    _replace(path, {**data, "state": outcome.state.value})


def read_outcome(path: Path) -> Outcome:
    """What `write_outcome` wrote."""
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
