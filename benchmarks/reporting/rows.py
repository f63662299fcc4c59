"""Rows of measurements, one for each system, mode, accumulation, network and round, and their file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from fcdp_compile.models.files.aside import written_aside


class Cell(NamedTuple):
    """One combination that the benchmark measures."""

    system: str
    mode: str
    accumulation: int
    network: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """The measurements of one launch in one cell.

    round: number of the pass over all systems.  date: ISO 8601.
    step_s: for each step, the slowest rank's time.  sent_bytes: for each step, the bytes that each node sent.
    check_losses: the loss, averaged over the ranks, after each check step up to and with this accumulation;
    all systems take equal check steps.  step_losses: the losses of the timed steps.
    first_step_s: the launch's first step, with compilation.  first_sent_bytes: what each node sent in it;
    older rows have none.  compute_s: a step of one micro-batch without communication, on all ranks at once,
    measured at the beginning of the launch.
    heap_bytes: for each rank, the heap's peak in a step, less the heap before the model was made (`memory`)
    and less the part of `host_bytes` in the heap.  host_bytes: for each rank, what is in host memory.
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
    first_sent_bytes: list[int] = field(default_factory=list)
    compute_s: float
    heap_bytes: list[int]
    host_bytes: list[int]
    all_bytes: int
    trained_bytes: int

    @property
    def cell(self) -> Cell:
        """The cell that this row measures."""
        return Cell(self.system, self.mode, self.accumulation, self.network)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A launch that gave no rows, and why."""

    system: str
    mode: str
    why: str


def write_records(path: Path, records: Iterable[ResultRow | Failure]) -> None:
    """Replace a file by a JSON list of these records, one on each line; never leaves half a file behind."""
    lines = [json.dumps(asdict(record)) for record in records]
    text = "[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n"
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def read_rows(path: Path) -> list[ResultRow]:
    """Read the rows of a file; an empty list if the file does not exist.

    Raises: ValueError if the file holds something else.
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
