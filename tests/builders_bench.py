"""Rows of the benchmark made by hand, with numbers that one can check by eye."""

from __future__ import annotations

from typing import Any

from benchmarks.reporting.record import Record
from benchmarks.reporting.rows import ResultRow
from benchmarks.running.machine import MachineRecord
from benchmarks.systems.shape import Shape

W, T = 100_000_000, 1_000_000
LOSSES = {1: [7.5, 7.4, 7.3], 8: [7.5, 7.4, 7.3, 7.2]}


def make_row(
    system: str,
    mode: str = "full",
    accumulation: int = 1,
    network: str = "100mbit",
    *,
    step_s: list[float] | None = None,
    sent_bytes: int = 100_000_000,
    losses: list[float] | None = None,
    compute_s: float = 1.0,
    number: int = 0,
) -> ResultRow:
    steps = step_s or [2.0, 1.0, 3.0]
    return ResultRow(
        system=system,
        mode=mode,
        accumulation=accumulation,
        network=network,
        round=number,
        date="2026-01-02T03:04:05+00:00",
        step_s=steps,
        sent_bytes=[[sent_bytes, sent_bytes] for _ in steps],
        check_losses=losses or LOSSES[accumulation],
        step_losses=[7.0 for _ in steps],
        first_step_s=9.0,
        compute_s=compute_s,
        heap_bytes=[2**20, 3 * 2**20],
        host_bytes=[0, 2**20],
        all_bytes=W,
        trained_bytes=W if mode == "full" else T,
    )


def make_record(**changes: Any) -> Record:
    machine = MachineRecord(
        processor="Abacus",
        cores=2,
        memory_bytes=2**30,
        system="Linux 1",
        versions=["torch 2"],
        commit="abc",
    )
    values: dict[str, Any] = {
        "shape": Shape(),
        "nodes": 2,
        "ranks_per_node": 2,
        "date": "2026-01-02T03:04:05+00:00",
        "elapsed_s": 120.0,
        "machine": machine,
        "skipped": [],
        "failures": [],
    }
    return Record(**{**values, **changes})
