"""The plots of the report: step times on each network, and bytes sent, one file for each mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")  # needs no display; before pyplot
import matplotlib.pyplot as plt

from benchmarks.network import NETWORKS
from benchmarks.report import MODE_TITLES, NETWORK_TITLES
from benchmarks.rows import Cell, Row
from benchmarks.summary import Summary, summarise
from benchmarks.systems import SYSTEMS

_COLOURS = {"unlimited": "#9ecae1", "1gbit": "#4292c6", "100mbit": "#08306b"}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw one SVG for each mode that was measured; returns their paths."""
    # The same rows give the same file, so that a rerun shows no difference where there is none.
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


def _draw_times(axis: plt.Axes, cells: Mapping[Cell, Summary], mode: str, k: int) -> None:
    names = _measured(cells, mode, k)
    height = 0.8 / len(NETWORKS)
    for offset, network in enumerate(NETWORKS):
        found = [
            (place, cells[cell])
            for place, name in enumerate(names)
            if (cell := Cell(name, mode, k, network)) in cells
        ]
        axis.barh(
            [place + (offset - 1) * height for place, _ in found],
            [s.step_s for _, s in found],
            height,
            xerr=[
                [s.step_s - s.least_s for _, s in found],
                [s.most_s - s.step_s for _, s in found],
            ],
            color=_COLOURS[network],
            label=NETWORK_TITLES[network],
            ecolor="gray",
        )
    axis.set_xscale("log")
    axis.set_xlabel("seconds (median, least to most)")
    axis.set_title(f"accumulation {k}")
    axis.legend(fontsize="small")
    _name(axis, names)


def _draw_bytes(axis: plt.Axes, cells: Mapping[Cell, Summary], mode: str, k: int) -> None:
    names = _measured(cells, mode, k)
    sent = [
        next(s.sent_bytes for c, s in cells.items() if c[:3] == (name, mode, k)) for name in names
    ]
    axis.barh(range(len(names)), [b / 1e6 for b in sent], 0.6, color="#4292c6")
    axis.set_xscale("log")
    axis.set_xlabel("MB sent per node")
    _name(axis, names)


def _measured(cells: Mapping[Cell, Summary], mode: str, k: int) -> list[str]:
    return [s.name for s in SYSTEMS if any(c[:3] == (s.name, mode, k) for c in cells)]


def _name(axis: plt.Axes, names: Sequence[str]) -> None:
    titles = {s.name: s.title for s in SYSTEMS}
    axis.set_yticks(range(len(names)), [titles[name] for name in names])
    axis.invert_yaxis()
