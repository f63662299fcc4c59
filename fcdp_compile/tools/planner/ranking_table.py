"""A ranking of strategies, or a sweep of rankings, as text, JSON, CSV or a plot: what the commands print."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fcdp_compile.errors import FcdpError
from fcdp_compile.extras import require
from fcdp_compile.tools.planner.job import Job
from fcdp_compile.tools.planner.ranking import Ranking, Row
from fcdp_compile.tools.view.table import table

_COLUMNS: dict[str, Callable[[Row], str]] = {
    "strategy": lambda row: row.strategy,
    "fits": lambda row: "yes" if row.fits else "no",
    "GPU [GB]": lambda row: f"{row.peak_gpu_bytes / 1e9:.2f}",
    "host of a node [GB]": lambda row: f"{row.host_bytes_per_node / 1e9:.2f}",
    "sent by a node [GB/step]": lambda row: f"{row.inter_bytes_per_step / 1e9:.3f}",
    "step [s]": lambda row: f"{row.step_s:.4g}",
    "compute waits [s]": lambda row: f"{row.exposed_s:.4g}",
    "samples/s": lambda row: f"{row.samples_per_s:.4g}",
    "largest batch/GPU": lambda row: (
        "?" if row.max_batch_per_gpu is None else str(row.max_batch_per_gpu)
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The ranking at one value of a sweep; text: the value as the user wrote it."""

    text: str
    ranking: Ranking


def shown(form: str, ranking: Ranking, job: Job) -> str:
    """Return a ranking in one of the forms "json", "csv" and "table"."""
    if form == "json":
        return json.dumps(asdict(ranking), indent=1)
    if form == "csv":
        return _csv([f.name for f in fields(Row)], map(_values, ranking.rows))
    rows = [[of(row) for of in _COLUMNS.values()] for row in ranking.rows]
    text = table(tuple(_COLUMNS), rows, ("left", "left", *["right"] * (len(_COLUMNS) - 2)))
    return f"{title(job)}\n\n{text}\n\n{ranking.why}"


def shown_sweep(form: str, of: str, points: Sequence[Point], job: Job) -> str:
    """Return a sweep in one of the forms; of: what it varies.

    The table has samples per second, a column for each strategy; in parentheses if it does not fit.
    """
    if form == "json":
        found = [{of: p.text, **asdict(p.ranking)} for p in points]
        return json.dumps({"sweep": found}, indent=1)
    if form == "csv":
        rows = ([p.text, *_values(row)] for p in points for row in p.ranking.rows)
        return _csv([of, *(f.name for f in fields(Row))], rows)
    columns = _by_strategy(points)
    cells = [
        (p.text, *map(_rate, rows), p.ranking.recommended or "nothing fits")
        for p, *rows in zip(points, *columns.values(), strict=True)
    ]
    align = ("right", *["right"] * len(columns), "left")
    text = table((of, *columns, "recommended"), cells, align)
    note = "samples per second; (in parentheses): does not fit"
    return f"{title(job, without=of)}\n{note}\n\n{text}"


def _by_strategy(points: Sequence[Point]) -> dict[str, list[Row | None]]:
    """The rows of each strategy at all points of a sweep; None where it was not planned."""
    found = [{row.strategy: row for row in p.ranking.rows} for p in points]
    names = dict.fromkeys(name for rows in found for name in rows)
    return {name: [rows.get(name) for rows in found] for name in names}


def _rate(row: Row | None) -> str:
    if row is None:
        return ""
    text = f"{row.samples_per_s:.4g}"
    return text if row.fits else f"({text})"


def _values(row: Row) -> list[Any]:
    return list(asdict(row).values())


def _csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([names, *rows])
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


_FORMATS = (".svg", ".png")
_LABELS = {"nodes": "nodes", "bandwidth": "bandwidth of a node's card [Gbit/s]"}
_BITS = 8e-9  # Gbit/s per byte/s


def check_plot(path: str) -> None:
    """Refuse a file that cannot be drawn, before anything takes time.

    Raises: FcdpError for another kind of file, a missing folder, or if matplotlib is missing.
    """
    file = Path(path)
    if file.suffix not in _FORMATS:
        raise FcdpError(f"--plot {path}: must end in {' or '.join(_FORMATS)}")
    if not file.parent.is_dir():
        raise FcdpError(f"--plot {path}: there is no folder {file.parent}")
    require("matplotlib.figure", "--plot")


def draw(
    path: str, of: str, values: Sequence[float], points: Sequence[Point], caption: str
) -> None:
    """Draw a sweep to a file; the line of a strategy that does not fit everywhere is dotted.

    Raises: OSError if the file cannot be written.
    """
    figure = require("matplotlib.figure", "--plot").Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    order = sorted(range(len(values)), key=lambda i: values[i])  # a line goes from left to right
    at = [values[i] * _BITS if of == "bandwidth" else values[i] for i in order]
    for name, rows in _by_strategy([points[i] for i in order]).items():
        rates = [(x, row.samples_per_s) for x, row in zip(at, rows, strict=True) if row is not None]
        (line,) = axes.plot(*zip(*rates, strict=True), marker="o", label=name)
        if not all(row is None or row.fits for row in rows):
            line.set_linestyle(":")
            line.set_label(f"{name} (does not fit everywhere)")
    axes.set_xscale("log", base=2 if of == "nodes" else 10)
    axes.set_yscale("log")
    axes.set_xticks(at, [f"{x:g}" for x in at])
    axes.set_xlabel(_LABELS[of])
    axes.set_ylabel("samples per second")
    axes.set_title(caption, fontsize="small", wrap=True)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
