"""The report's plots: step times on each network and bytes sent; one file for each mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")  # needs no display; before pyplot
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from benchmarks.reporting.report import MODE_TITLES, NETWORK_TITLES
from benchmarks.reporting.rows import Cell, ResultRow
from benchmarks.reporting.summary import Summary, summarise
from benchmarks.systems.names import SYSTEMS

_COLOURS = {"unlimited": "#9ecae1", "1gbit": "#4292c6", "100mbit": "#08306b"}


def draw(rows: Sequence[ResultRow], folder: Path) -> list[Path]:
    """Draw one SVG for each mode that was measured; returns their paths."""
    # A fixed salt: equal rows give an equal file.
    mpl.rcParams["svg.hashsalt"] = "fcdp"
    cells = summarise(rows)
    files = []
    for mode, title in MODE_TITLES.items():
        accumulations = sorted({cell.accumulation for cell in cells if cell.mode == mode})
        if not accumulations:
            continue
        figure, axes = plt.subplots(
            2, len(accumulations), figsize=(6 * len(accumulations), 9), squeeze=False
        )
        for column, k in enumerate(accumulations):
            _draw_times(axes[0][column], cells, mode, k)
            _draw_bytes(axes[1][column], cells, mode, k)
        figure.suptitle(f"{title}: one optimizer step")
        figure.tight_layout()
        files.append(folder / f"{mode}.svg")
        figure.savefig(files[-1], metadata={"Date": None})
        plt.close(figure)
    return files


def _draw_times(axis: Axes, cells: Mapping[Cell, Summary], mode: str, k: int) -> None:
    names = _measured(cells, mode, k)
    for network, colour in _COLOURS.items():
        found = [
            (place, cells[cell])
            for place, name in enumerate(names)
            if (cell := Cell(name, mode, k, network)) in cells
        ]
        below = [s.step_s - s.least_s for _, s in found]
        above = [s.most_s - s.step_s for _, s in found]
        axis.errorbar(
            [s.step_s for _, s in found],
            [place for place, _ in found],
            xerr=[below, above],
            fmt="o",
            color=colour,
            label=NETWORK_TITLES[network],
        )
    axis.set_xlabel("seconds (median, least to most)")
    axis.set_title(f"accumulation {k}")
    axis.legend(fontsize="small")
    _scale(axis, names)


def _draw_bytes(axis: Axes, cells: Mapping[Cell, Summary], mode: str, k: int) -> None:
    names = _measured(cells, mode, k)
    sent = [
        next(s.sent_bytes for c, s in cells.items() if c[:3] == (name, mode, k)) for name in names
    ]
    axis.plot([b / 1e6 for b in sent], range(len(names)), "o", color="#08306b")
    axis.set_xlabel("MB sent per node")
    _scale(axis, names)


def _measured(cells: Mapping[Cell, Summary], mode: str, k: int) -> list[str]:
    return [s.name for s in SYSTEMS if any(c[:3] == (s.name, mode, k) for c in cells)]


def _scale(axis: Axes, names: Sequence[str]) -> None:
    """Set the axes: systems on y, logarithmic x.  Hence points: a bar would have no zero to start from."""
    titles = {s.name: s.title for s in SYSTEMS}
    axis.set_yticks(range(len(names)), [titles[name] for name in names])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    # Only the ticks 2 and 5 of each decade have labels: the labels of all ticks would overlap.
    axis.xaxis.set_minor_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    )
    axis.tick_params(axis="x", which="minor", labelsize="xx-small")
    axis.grid(visible=True, which="both", alpha=0.3)
