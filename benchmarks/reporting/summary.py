"""Summaries of the rows of one cell: medians, spreads, and whether the losses are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.reporting.rows import Cell, ResultRow
from benchmarks.running.network import NETWORKS
from benchmarks.systems.names import BY_NAME, System

REFERENCE = "ddp"
LOSS_TOLERANCE = 1e-4
"""Relative.  Gradients summed in another order change losses by 1e-6, a missed or stale update by 1e-3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The measurements of one cell.

    step_s: median; least_s, most_s: the fastest and the slowest of n steps.  sent_bytes: mean over steps and
    nodes.  compute_s: a step without communication in the same launches.  heap_bytes, host_bytes: the
    largest over the ranks.  first_step_s: the longest of the launches: only that launch compiled anew.
    loss: after `losses` check steps.  wrong: how the losses differ from the reference; None if they agree.
    is_checked: whether there was a reference.
    """

    cell: Cell
    n: int
    step_s: float
    least_s: float
    most_s: float
    sent_bytes: float
    compute_s: float
    heap_bytes: int
    host_bytes: int
    first_step_s: float
    loss: float
    losses: int
    wrong: str | None
    is_checked: bool
    all_bytes: int
    trained_bytes: int

    @property
    def system(self) -> System:
        """The system's record."""
        return BY_NAME[self.cell.system]

    @property
    def is_right(self) -> bool:
        """Whether its losses were compared and agree."""
        return self.is_checked and self.wrong is None

    @property
    def accumulated_compute_s(self) -> float:
        """Compute of the whole step: of all accumulated micro-batches."""
        return self.compute_s * self.cell.accumulation

    @property
    def transfer_s(self) -> float:
        """The least time that the network needs for the bytes sent."""
        return NETWORKS[self.cell.network].transfer_s(self.sent_bytes)


def summarise(rows: Sequence[ResultRow]) -> dict[Cell, Summary]:
    """Return one summary for each cell that has rows, in the order of the rows."""
    references = {
        (row.mode, row.accumulation): row.check_losses for row in rows if row.system == REFERENCE
    }
    by_cell: dict[Cell, list[ResultRow]] = {}
    for row in rows:
        by_cell.setdefault(row.cell, []).append(row)
    return {
        cell: _summarise(cell, found, references.get((cell.mode, cell.accumulation)))
        for cell, found in by_cell.items()
    }


def _summarise(cell: Cell, rows: Sequence[ResultRow], reference: Sequence[float] | None) -> Summary:
    seconds = [s for row in rows for s in row.step_s]
    tolerance = BY_NAME[cell.system].loss_tolerance if cell.system in BY_NAME else LOSS_TOLERANCE
    differences = [_difference(row.check_losses, reference, tolerance) for row in rows if reference]
    return Summary(
        cell=cell,
        n=len(seconds),
        step_s=median(seconds),
        least_s=min(seconds),
        most_s=max(seconds),
        sent_bytes=mean(sent for row in rows for step in row.sent_bytes for sent in step),
        compute_s=median(row.compute_s for row in rows),
        heap_bytes=max(b for row in rows for b in row.heap_bytes),
        host_bytes=max(b for row in rows for b in row.host_bytes),
        first_step_s=max(row.first_step_s for row in rows),
        loss=rows[-1].check_losses[-1],
        losses=len(rows[-1].check_losses),
        wrong=next((d for d in differences if d is not None), None),
        is_checked=bool(differences),
        all_bytes=rows[-1].all_bytes,
        trained_bytes=rows[-1].trained_bytes,
    )


def _difference(
    losses: Sequence[float], reference: Sequence[float], tolerance: float
) -> str | None:
    """Say how the losses differ from the reference's; None if they are within the tolerance."""
    if len(losses) != len(reference):
        return f"{len(losses)} losses where {REFERENCE} has {len(reference)}"
    for number, (loss, right) in enumerate(zip(losses, reference, strict=True), start=1):
        # `not <=` instead of `>`: NaN is wrong, too.
        if not abs(loss - right) <= tolerance * abs(right):
            return f"loss {loss:.5f} after step {number}, {REFERENCE} has {right:.5f}"
    return None
