"""A ranking of strategies as text, and as the JSON and CSV of `fcdp plan` and `fcdp simulate`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from tabulate import tabulate

from fcdp_compile.tools.planner.job import Job
from fcdp_compile.tools.planner.ranking import Ranking, Row

_HEADERS = (
    "strategy",
    "fits",
    "GPU [GB]",
    "host of a node [GB]",
    "sent by a node [GB/step]",
    "step [s]",
    "compute waits [s]",
    "samples/s",
    "largest batch/GPU",
)
_ALIGN = ("left", "left", *["right"] * 7)


def ranking_text(ranking: Ranking, job: Job) -> str:
    """Return the rows as a table, under a line that names the job, and the recommendation."""
    table = tabulate(
        [_cells(row) for row in ranking.rows],
        headers=_HEADERS,
        colalign=_ALIGN,
        tablefmt="simple",
        disable_numparse=True,
    )
    return f"{title(job)}\n\n{table}\n\n{ranking.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The ranking at one value of a sweep; text: the value as the user wrote it."""

    text: str
    ranking: Ranking


def sweep_text(points: Sequence[Point], of: str, job: Job) -> str:
    """Return a table of samples per second, a column for each strategy; in parentheses if it does not fit."""
    names = list(dict.fromkeys(row.strategy for p in points for row in p.ranking.rows))
    rows = []
    for point in points:
        found = {row.strategy: row for row in point.ranking.rows}
        cells = [_rate(found.get(name)) for name in names]
        rows.append((point.text, *cells, point.ranking.recommended or "nothing fits"))
    table = tabulate(
        rows,
        headers=(of, *names, "recommended"),
        colalign=("right", *["right"] * len(names), "left"),
        tablefmt="simple",
        disable_numparse=True,
    )
    note = "samples per second; (in parentheses): does not fit"
    return f"{title(job, without=of)}\n{note}\n\n{table}"


def _rate(row: Row | None) -> str:
    if row is None:
        return ""
    text = f"{row.samples_per_s:.4g}"
    return text if row.fits else f"({text})"


def rows_csv(rows: Iterable[tuple[str | None, Row]], of: str) -> str:
    """Return rows as CSV, each with the sweep's value in front if there is a sweep."""
    written = io.StringIO()
    names = [f.name for f in fields(Row)]
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([of, *names] if of else names)
    for value, row in rows:
        cells = [getattr(row, name) for name in names]
        writer.writerow([value, *cells] if of else cells)
    return written.getvalue().rstrip("\n")


def title(job: Job, *, without: str = "") -> str:
    """Return the job in one line; without: the quantity that a sweep varies."""
    accumulate = f", {job.accumulate} micro-batches a step" if job.accumulate > 1 else ""
    nodes = "N" if without == "nodes" else str(job.nodes)
    inner = f",{job.inner}" if job.inner else ""
    return (
        f"{nodes} x {job.ranks_per_node} ranks (N x g) of {job.profile.name}{inner}, batch {job.batch} a GPU"
        f"{accumulate}; {job.device_bytes / 1e9:.1f} GB of a GPU and "
        f"{job.host_bytes_per_rank * job.ranks_per_node / 1e9:.0f} GB of a node may be used"
    )


def ranking_record(ranking: Ranking) -> dict[str, Any]:
    """Return the JSON object of a ranking."""
    return {
        "rows": [asdict(row) for row in ranking.rows],
        "recommended": ranking.recommended,
        "why": ranking.why,
    }


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.strategy,
        "yes" if row.fits else "no",
        f"{row.peak_gpu_bytes / 1e9:.2f}",
        f"{row.host_bytes_per_node / 1e9:.2f}",
        f"{row.inter_bytes_per_step / 1e9:.3f}",
        f"{row.step_s:.4g}",
        f"{row.exposed_s:.4g}",
        f"{row.samples_per_s:.4g}",
        "?" if row.max_batch_per_gpu is None else str(row.max_batch_per_gpu),
    )
