"""The planner against the benchmark: predicted and measured steps of every row of fcdp.

    python -m benchmarks.prediction            prints docs/benchmarks/predictions.md

Link speeds come from one profile that `fcdp probe` measured on the benchmark's simulated nodes at 1 Gbit/s,
scaled to the other networks.  Compute comes from the benchmark's micro-batches without communication.  So
one set of constants serves all rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.reporting.rows import Cell, ResultRow, read_rows
from benchmarks.systems.model import make_model
from benchmarks.systems.names import BY_NAME
from benchmarks.systems.shape import Shape
from benchmarks.systems.train_fcdp import STRATEGIES
from fcdp_compile.cluster.profile import ClusterProfile, read_profile
from fcdp_compile.strategy import Strategy
from fcdp_compile.tools.planner import Estimate, Job, TracedModel, estimate, trace

FOLDER = Path(__file__).parent.parent / "docs" / "benchmarks"
NODES, RANKS_PER_NODE = 2, 2
SHAPE = Shape()

_NETWORKS = {"unlimited": None, "1gbit": 1.0, "100mbit": 0.1}
"""Bandwidth in multiples of the profile's; None: as fast as the link within a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predictions and measurements of one cell; bytes are those that one node sends in one step."""

    cell: Cell
    planned_bytes: int
    sent_bytes: float
    predicted_s: float
    measured_s: float
    network_s: float

    @property
    def error(self) -> float:
        """The error of the predicted time, relative to the measured time."""
        return self.predicted_s / self.measured_s - 1

    @property
    def is_network_bound(self) -> bool:
        """Whether the network alone takes more than half of the step."""
        return self.network_s > 0.5 * self.measured_s


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description="predicted against measured, as Markdown")
    parser.add_argument("--rows", type=Path, default=FOLDER / "rows.json")
    parser.add_argument("--profile", type=Path, default=FOLDER / "cluster-2x2-1gbit.json")
    options = parser.parse_args(argv)
    in_fp32 = {name for name in STRATEGIES if not BY_NAME[name].in_bf16}  # as the profile's compute
    rows = [r for r in read_rows(options.rows) if r.system in in_fp32]
    profile = read_profile(options.profile)
    print(_report(_predictions(rows, profile), profile))


def _predictions(rows: Sequence[ResultRow], profile: ClusterProfile) -> list[Prediction]:
    by_cell: dict[Cell, list[ResultRow]] = {}
    for row in rows:
        by_cell.setdefault(row.cell, []).append(row)
    compute_s = {
        mode: median(r.compute_s for r in rows if r.mode == mode) for mode in ("lora", "full")
    }
    return [_predict(cell, found, profile, compute_s) for cell, found in by_cell.items()]


def _predict(
    cell: Cell, rows: Sequence[ResultRow], profile: ClusterProfile, compute_s: dict[str, float]
) -> Prediction:
    factor = _NETWORKS[cell.network]
    machine = profile.machine
    inter = (
        machine.intra
        if factor is None
        else replace(machine.inter, bytes_per_s=factor * machine.inter.bytes_per_s)
    )
    # The benchmark timed one micro-batch's compute; the ratio to the profile's prediction corrects the rates.
    slower = compute_s[cell.mode] / _compute_s(cell.mode, profile)
    fitted = replace(
        machine,
        inter=inter,
        flops_per_s=machine.flops_per_s / slower,
        memory_bytes_per_s=machine.memory_bytes_per_s / slower,
    )
    found = _estimate(cell.system, cell.mode, cell.accumulation, replace(profile, machine=fitted))
    step = found.simulate()
    sent = [b for r in rows for of_step in r.sent_bytes for b in of_step]
    return Prediction(
        cell=cell,
        planned_bytes=step.bytes_sent_by_node,
        sent_bytes=sum(sent) / len(sent),
        predicted_s=step.step_s,
        measured_s=median(s for r in rows for s in r.step_s),
        network_s=step.bytes_sent_by_node / inter.bytes_per_s,
    )


@cache
def _compute_s(mode: str, profile: ClusterProfile) -> float:
    """Return the compute seconds of a micro-batch according to the profile."""
    found = _estimate("fcdp-zero3", mode, 1, profile)
    machine = profile.machine
    return sum(
        machine.time_s(step, RANKS_PER_NODE)
        for part in found.parts
        for step in part.steps
        if step.lane.value == "compute"
    )


@cache
def _estimate(system: str, mode: str, accumulation: int, profile: ClusterProfile) -> Estimate:
    job = Job(
        profile=profile,
        nodes=NODES,
        ranks_per_node=RANKS_PER_NODE,
        batch=SHAPE.batch,
        accumulate=accumulation,
    )
    return estimate(_traced(mode), Strategy.parse(STRATEGIES[system]), job)


@cache
def _traced(mode: str) -> TracedModel:
    return trace(partial(_build, mode), seq=SHAPE.length, param_dtype=None)


def _build(mode: str, batch: int, seq: int) -> tuple[nn.Module, tuple[Tensor]]:
    return make_model(SHAPE, mode), (torch.zeros(batch, seq + 1, dtype=torch.long),)


def _report(found: Sequence[Prediction], profile: ClusterProfile) -> str:
    order = sorted(found, key=lambda p: (not p.is_network_bound, p.cell))
    rows = [
        (
            p.cell.system,
            p.cell.mode,
            p.cell.accumulation,
            p.cell.network,
            f"{p.planned_bytes / 1e6:.2f}",
            f"{p.sent_bytes / 1e6:.2f}",
            f"{p.sent_bytes / p.planned_bytes - 1:+.1%}",
            f"{p.predicted_s:.2f}",
            f"{p.measured_s:.2f}",
            f"{p.error:+.0%}",
            "network" if p.is_network_bound else "",
        )
        for p in order
    ]
    headers = (
        "system", "mode", "accumulation", "network", "planned MB", "sent MB", "more",
        "predicted s", "measured s", "error", "bound by",
    )  # fmt: skip
    table = tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True)
    bound = [p for p in found if p.is_network_bound]
    inside = sum(abs(p.error) <= 0.15 for p in bound)
    worst = max((abs(p.error) for p in bound), default=0.0)
    return (
        "`python -m benchmarks.prediction` made this table from rows.json and the profile "
        f"{profile.name!r}.\n\nIn rows in which the network takes more than half of the step, {inside} of "
        f"{len(bound)} predictions are within 15 % of the measured time; the worst is off by {worst:.0%}. "
        "*more*: the bytes that the network card counted beyond the plan, for headers and "
        f"agreements.\n\n{table}"
    )


if __name__ == "__main__":
    main()
