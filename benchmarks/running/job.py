"""What one launch has to do, handed from the driver to the workers as a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from benchmarks.reporting.rows import Cell
from benchmarks.systems.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """So many timed steps with that accumulation on that network."""

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
    check_steps: steps at each accumulation, 1 among them, before anything is timed, on the uncapped network.
    All systems take the same, so their losses must agree; the first one compiles.
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
        """The cells that it measures."""
        return [Cell(self.system, self.mode, t.accumulation, t.network) for t in self.timed]

    def to_json(self) -> str:
        """Write it down."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> BenchmarkJob:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        data["shape"] = Shape(**data["shape"])
        data["timed"] = [TimedSteps(**entry) for entry in data["timed"]]
        data["check_steps"] = {int(k): v for k, v in data["check_steps"].items()}
        return BenchmarkJob(**data)
