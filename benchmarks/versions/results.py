"""The results of the parts, by torch and Python, in a file that is written after every part."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from fcdp_compile.models.files.aside import written_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one part with one Python and one torch.

    torch: with the build's local label, such as 2.13.0+cpu.
    failures: names of tests, or the last line of output if no test is named.
    """

    python: str
    torch: str
    part: str
    passed: int
    skipped: int
    failures: tuple[str, ...]
    seconds: float
    commit: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Python's minor version, torch without its label, and the part; each key has one result."""
        return self.python.rpartition(".")[0], self.torch.partition("+")[0], self.part


def read(file: Path) -> dict[tuple[str, str, str], Result]:
    """Read the results so far, by key."""
    if not file.exists():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))
    results = [Result(**(row | {"failures": tuple(row["failures"])})) for row in rows]
    return {result.key: result for result in results}


def add(file: Path, result: Result) -> None:
    """Write a result, in place of an older result with an equal key."""
    results = read(file) | {result.key: result}
    rows = [asdict(results[key]) for key in sorted(results)]
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(file) as aside:
        aside.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def numbers(version: str) -> list[int]:
    """Return the numbers of a version, to sort versions by."""
    return [int(n) for n in version.split(".")]
