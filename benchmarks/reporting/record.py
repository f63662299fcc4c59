"""The record of a run, kept besides its rows, and the record's file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.reporting.rows import Cell, Failure
from benchmarks.running.machine import MachineRecord
from benchmarks.running.matrix import Skipped
from benchmarks.systems.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Facts about a run.  date: time of the last row.  elapsed_s: of all launches together."""

    shape: Shape
    nodes: int
    ranks_per_node: int
    date: str
    elapsed_s: float
    machine: MachineRecord
    skipped: list[Skipped]
    failures: list[Failure]


def write_record(path: Path, record: Record) -> None:
    """Write the record, in place of an older one."""
    path.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def read_record(path: Path) -> Record | None:
    """Read the record that `write_record` wrote; None if there is no file.

    Raises: ValueError if the file holds something else.
    """
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        data["shape"] = Shape(**data["shape"])
        data["machine"] = MachineRecord(**data["machine"])
        data["skipped"] = [
            Skipped(cell=Cell(*entry["cell"]), step_s=entry["step_s"]) for entry in data["skipped"]
        ]
        data["failures"] = [Failure(**entry) for entry in data["failures"]]
        return Record(**data)
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} was not written by this version of the benchmark ({error}); delete it or pass "
            "another --out"
        ) from error
