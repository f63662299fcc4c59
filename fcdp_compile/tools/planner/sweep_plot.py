"""Draw a sweep: samples per second of each strategy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fcdp_compile.errors import FcdpError
from fcdp_compile.extras import require
from fcdp_compile.tools.planner.ranking import Row
from fcdp_compile.tools.planner.ranking_table import Point

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
    points = [points[i] for i in order]
    at = [values[i] * _BITS if of == "bandwidth" else values[i] for i in order]
    names = list(dict.fromkeys(row.strategy for p in points for row in p.ranking.rows))
    for name in names:
        found = [_row_of(p, name) for p in points]
        rates = [None if row is None else row.samples_per_s for row in found]
        xs = [x for x, rate in zip(at, rates, strict=True) if rate is not None]
        (line,) = axes.plot(xs, [r for r in rates if r is not None], marker="o", label=name)
        if not all(row is None or row.fits for row in found):
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


def _row_of(point: Point, name: str) -> Row | None:
    return next((row for row in point.ranking.rows if row.strategy == name), None)
