"""The job of one launch, which the driver hands to the workers as a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from benchmarks.reporting.rows import Cell
from benchmarks.systems.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """A number of timed steps with one accumulation on one network."""

    accumulation: int
    network: str
    steps: int

    def __post_init__(self) -> None:
        if self.accumulation < 1 or self.steps < 1:
            raise ValueError(f"{self} has nothing to do; accumulation and steps must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkJob:
    """One system in one mode, trained by a fresh set of processes.

    nodes: N, with ranks_per_node ranks each.
    check_steps: by accumulation (always with 1), the steps on the uncapped network before anything is timed.
    All systems take equal check steps, so their losses must agree; the first step compiles.
    """

    system: str
    mode: str
    round: int
    shape: Shape
    nodes: int
    ranks_per_node: int
    check_steps: dict[int, int]
    timed: list[TimedSteps]

    def cells(self) -> list[Cell]:
        """The cells that this job measures."""
        return [Cell(self.system, self.mode, t.accumulation, t.network) for t in self.timed]

    def to_json(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> BenchmarkJob:
        """Read a job from the JSON of `to_json`."""
        data = json.loads(text)
        data["shape"] = Shape(**data["shape"])
        data["timed"] = [TimedSteps(**entry) for entry in data["timed"]]
        data["check_steps"] = {int(k): v for k, v in data["check_steps"].items()}
        return BenchmarkJob(**data)
