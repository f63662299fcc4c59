"""What came of a case of a suite, and the file that holds all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from fcdp_compile.errors import FcdpError
from fcdp_compile.models.files.aside import written_aside


class Status(StrEnum):
    """What a case showed."""

    EQUAL = "equal"
    REFUSED = "refused"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """text: fcdp's sentence, the error, or why the case was skipped."""

    status: Status
    text: str = ""
    seconds: float = 0.0


class SkippedError(Exception):
    """The case cannot run here; the message says why."""


def outcome_of(error: BaseException) -> Outcome:
    """Tell fcdp's refusals from failures; Dynamo wraps both, and pytest's skips are no failures."""
    chain = list(_causes(error))
    for one in chain:
        if isinstance(one, FcdpError):
            return Outcome(status=Status.REFUSED, text=_line(one))
        if isinstance(one, ImportError | SkippedError) or type(one).__name__ in (
            "Skipped",
            "SkipTest",
        ):
            return Outcome(status=Status.SKIPPED, text=_line(one))
    text = f"{type(chain[-1]).__name__}: {_line(chain[-1])}"
    return Outcome(status=Status.FAILED, text=text)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and not any(one is other for other in seen):
        seen.append(one)
        yield one
        one = getattr(one, "inner_exception", None) or one.__cause__


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def joined(ranks: list[Outcome]) -> Outcome:
    """One outcome of those of all ranks: the worst, or a failure if ranks disagree on a refusal."""
    order = (Status.FAILED, Status.REFUSED, Status.SKIPPED, Status.EQUAL)
    worst = min(ranks, key=lambda one: order.index(one.status))
    if worst.status is Status.REFUSED and any(one.status is not worst.status for one in ranks):
        return Outcome(status=Status.FAILED, text=f"only some ranks refused: {worst.text}")
    return worst


def read(file: Path) -> dict[str, dict[str, Outcome]]:
    """Read the outcomes by suite and case."""
    if not file.exists():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))
    return {
        suite: {
            case: Outcome(status=Status(row["status"]), text=row["text"], seconds=row["seconds"])
            for case, row in cases.items()
        }
        for suite, cases in rows.items()
    }


def write(file: Path, outcomes: Mapping[str, Mapping[str, Outcome]]) -> None:
    """Write the outcomes, one line a case."""
    file.parent.mkdir(parents=True, exist_ok=True)
    suites = [
        f" {json.dumps(suite)}: {{\n"
        + ",\n".join(f"  {json.dumps(case)}: {json.dumps(asdict(o))}" for case, o in cases.items())
        + "\n }"
        for suite, cases in sorted(outcomes.items())
    ]
    with written_aside(file) as aside:
        aside.write_text("{\n" + ",\n".join(suites) + "\n}\n", encoding="utf-8")
