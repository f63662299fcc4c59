"""What is measured: one row for each system, mode, accumulation, network and round, and its file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from fcdp_compile.files.aside import written_aside


class Cell(NamedTuple):
    """One entry of the matrix."""

    system: str
    mode: str
    accumulation: int
    network: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """What one launch measured in one cell.

    round: which pass over all systems.  date: when, ISO 8601.
    step_s: of each step, the slowest rank's time.  sent_bytes: of each step, what each node sent.
    check_losses: mean over the ranks after each step of the fixed beginning that all systems share, up to and
    with this accumulation.  step_losses: those of the timed steps.
    first_step_s: of the launch, with compilation.  compute_s: of a step of one micro-batch without any
    communication, on all ranks at once, measured at the beginning of the launch.
    heap_bytes: of each rank, the peak of the heap in a step, less what it was before the model (`memory`) and
    less what would be in host memory.  host_bytes: of each rank, parameters kept in host memory.
    all_bytes, trained_bytes: of the whole model.
    """

    system: str
    mode: str
    accumulation: int
    network: str
    round: int
    date: str
    step_s: list[float]
    sent_bytes: list[list[int]]
    check_losses: list[float]
    step_losses: list[float]
    first_step_s: float
    compute_s: float
    heap_bytes: list[int]
    host_bytes: list[int]
    all_bytes: int
    trained_bytes: int

    @property
    def cell(self) -> Cell:
        """Where in the matrix it belongs."""
        return Cell(self.system, self.mode, self.accumulation, self.network)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A launch that gave no rows, and why."""

    system: str
    mode: str
    why: str


def write_records(path: Path, records: Iterable[ResultRow | Failure]) -> None:
    """Replace a file by these records, one a line of a JSON list; never leaves half a file behind."""
    lines = [json.dumps(asdict(record)) for record in records]
    text = "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def read_rows(path: Path) -> list[ResultRow]:
    """The rows of a file, none if it does not exist.

    Raises: ValueError if it holds something else.
    """
    if not path.exists():
        return []
    try:
        return [ResultRow(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(
            f"{path} does not hold rows of this version of the benchmark ({error}); delete it or pass "
            "another --out"
        ) from error
