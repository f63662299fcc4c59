"""A ranking of strategies for reading, and as the JSON of `fcdp plan` and `fcdp simulate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from fcdp_compile.planner.job import Job
from fcdp_compile.planner.ranking import Ranking, Row

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
    """Rows under a line that says what they are of, and the recommendation."""
    table = tabulate(
        [_cells(row) for row in ranking.rows],
        headers=_HEADERS,
        colalign=_ALIGN,
        tablefmt="simple",
        disable_numparse=True,
    )
    return f"{title(job)}\n\n{table}\n\n{ranking.why}"


def title(job: Job) -> str:
    """What is planned, in one line."""
    accumulate = f", {job.accumulate} micro-batches a step" if job.accumulate > 1 else ""
    return (
        f"{job.nodes} x {job.ranks_per_node} ranks (N x g) of {job.profile.name}, batch {job.batch} a GPU"
        f"{accumulate}; {job.device_bytes / 1e9:.1f} GB of a GPU and "
        f"{job.host_bytes_per_rank * job.ranks_per_node / 1e9:.0f} GB of a node may be used"
    )


def ranking_record(ranking: Ranking) -> dict[str, Any]:
    """The JSON object of a ranking."""
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
