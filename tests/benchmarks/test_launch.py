"""A whole job: processes on two nodes, training, rows; and failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.launch import run_job
from benchmarks.reporting.rows import Failure, ResultRow
from benchmarks.reporting.summary import summarise
from benchmarks.running.job import BenchmarkJob, TimedSteps
from benchmarks.systems.shape import Shape
from tests.cluster.simulated import needs_nodes

pytestmark = needs_nodes

_TINY = Shape(layers=1, width=64, vocabulary=32, batch=1, length=8)


def _job(system: str) -> BenchmarkJob:
    timed = [TimedSteps(accumulation=1, network=n, steps=1) for n in ("unlimited", "100mbit")]
    return BenchmarkJob(
        system=system,
        mode="full",
        round=0,
        shape=_TINY,
        nodes=2,
        ranks_per_node=1,
        check_steps={1: 2},
        timed=timed,
    )


@pytest.mark.rare
def test_two_systems_on_two_nodes_agree(tmp_path: Path) -> None:
    rows: list[ResultRow] = []
    for system in ("ddp", "fcdp"):
        found = run_job(_job(system), folder=tmp_path, timeout_s=120)
        assert not isinstance(found, Failure), found
        rows += found
    cells = summarise(rows)
    assert [(c.system, c.network) for c in cells] == [
        ("ddp", "unlimited"),
        ("ddp", "100mbit"),
        ("fcdp", "unlimited"),
        ("fcdp", "100mbit"),
    ]
    assert all(s.is_right for s in cells.values()), [s.wrong for s in cells.values()]
    for summary in cells.values():
        # Both send about W in one step (gradients, or gathers and gradients), and a few control messages.
        assert 1.0 <= summary.sent_bytes / summary.all_bytes <= 1.5
        assert summary.heap_bytes > summary.all_bytes / 2
        assert 0 < summary.compute_s < summary.first_step_s + 60
        assert len(rows[0].check_losses) == 2
    capped = cells[rows[1].cell]
    assert capped.step_s >= 0.5 * capped.transfer_s, "the cap was in place"


@pytest.mark.rare
def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    found = run_job(_job("nonsense"), folder=tmp_path, timeout_s=60)
    assert isinstance(found, Failure)
    assert "KeyError: 'nonsense'" in found.why
