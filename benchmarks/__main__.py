"""Run the matrix and write the report: `make bench`, or python -m benchmarks [--help]."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from tabulate import tabulate

from benchmarks.cluster.nodes import why_not
from benchmarks.launch import ROOT, run_job
from benchmarks.reporting.plots import draw
from benchmarks.reporting.record import Record, read_record, write_record
from benchmarks.reporting.report import write_report
from benchmarks.reporting.rows import Cell, Failure, ResultRow, read_rows, write_records
from benchmarks.reporting.summary import summarise
from benchmarks.running.arguments import Arguments, parse
from benchmarks.running.job import BenchmarkJob
from benchmarks.running.machine import MachineRecord
from benchmarks.running.matrix import Durations, JobOrder, Skipped, all_cells, plan
from benchmarks.systems.names import BY_NAME

NODES, RANKS_PER_NODE = 2, 2
_PATIENCE = 4.0
"""A job is stopped after two minutes and this multiple of its expected time."""


class Bench:
    """One run of the benchmark; writes its results to disk after every launch."""

    def __init__(self, args: Arguments) -> None:
        self.args = args
        self.folder = args.out / "benchmarks"
        self.costs = Durations(shape=args.shape, ranks=NODES * RANKS_PER_NODE)
        self.rows: list[ResultRow] = []
        self.failures: list[Failure] = []
        self.skipped: list[Skipped] = []
        self.elapsed_s = 0.0
        self.date = ""
        if args.resume or args.action == "report":
            self.take_up()

    def take_up(self) -> None:
        """Continue from the rows of an earlier run.

        Raises: ValueError if the rows are of another model.
        """
        record = read_record(self.folder / "run.json")
        if record is None:
            return
        if record.shape != self.args.shape and self.args.action != "report":
            raise ValueError(
                f"{self.folder} holds rows of {record.shape}, not of {self.args.shape}; pass the same "
                "sizes, or leave --resume away to start anew"
            )
        self.rows = [
            r for r in read_rows(self.folder / "rows.json") if r.system not in self.args.redo
        ]
        self.elapsed_s, self.date = record.elapsed_s, record.date
        if self.args.action == "report":
            self.failures, self.skipped = record.failures, record.skipped

    def schedule(self) -> JobOrder:
        """Plan the cells that are not measured yet, fitted into the time."""
        done = {row.cell for row in self.rows}
        wanted = all_cells(
            systems=[name for name in self.args.systems if self.is_available(name)],
            modes=self.args.modes,
            accumulations=self.args.accumulations,
            networks=self.args.networks,
        )
        cells = [cell for cell in wanted if cell not in done]
        if not cells:
            return JobOrder(jobs=[], skipped=[], expected_s=0.0)
        return plan(
            cells,
            shape=self.args.shape,
            costs=self.costs,
            budget_s=60 * self.args.minutes,
            rounds=self.args.rounds,
            nodes=NODES,
            ranks_per_node=RANKS_PER_NODE,
        )

    def is_available(self, name: str) -> bool:
        """Whether a system is installed; records a failure if not."""
        if BY_NAME[name].family != "train_deepspeed" or find_spec("deepspeed") is not None:
            return True
        why = "DeepSpeed is not installed; `pip install 'fcdp[bench-deepspeed]'` builds it"
        self.failures += [Failure(system=name, mode=mode, why=why) for mode in self.args.modes]
        return False

    def run(self, schedule: JobOrder) -> None:
        """Run the jobs while there is time, and save the results after each job."""
        self.skipped = list(schedule.skipped)
        work = ROOT / "build" / "benchmark"
        work.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        spent_before_s = self.elapsed_s
        for number, job in enumerate(schedule.jobs, start=1):
            expected_s = self.costs.job_s(job)
            left_s = 60 * self.args.minutes * 1.25 - (time.monotonic() - began)
            name = (
                f"[{number}/{len(schedule.jobs)}] {job.mode} {job.system} (round {job.round + 1})"
            )
            if number > 1 and expected_s > left_s:
                _say(f"{name}: no time left")
                self.skip(job)
            else:
                _say(f"{name}: about {expected_s:.0f} s")
                self.take(run_job(job, folder=work, timeout_s=120 + _PATIENCE * expected_s))
            self.elapsed_s = spent_before_s + time.monotonic() - began
            self.save()

    def skip(self, job: BenchmarkJob) -> None:
        """Record the cells of a job for which there was no time, except for cells that have a row."""
        done = {row.cell for row in self.rows}
        self.skipped += [
            Skipped(cell=cell, step_s=self.costs.step_s(cell))
            for cell in job.cells()
            if cell not in done
        ]

    def take(self, result: list[ResultRow] | Failure) -> None:
        """Add the result of a job."""
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        if isinstance(result, Failure):
            _say(f"  failed: {result.why}")
            self.failures.append(result)
            return
        for summary in summarise(result).values():
            _say(
                f"  accumulation {summary.cell.accumulation}, {summary.cell.network}: "
                f"{summary.step_s:.2f} s, {summary.sent_bytes / 1e6:.2f} MB, loss {summary.loss:.4f}"
            )
        self.rows += result

    def save(self) -> None:
        """Write rows, record, plots and report."""
        record = Record(
            shape=self.args.shape,
            nodes=NODES,
            ranks_per_node=RANKS_PER_NODE,
            date=self.date,
            elapsed_s=self.elapsed_s,
            machine=MachineRecord.here(),
            skipped=self.skipped,
            failures=self.failures,
        )
        write_records(self.folder / "rows.json", self.rows)
        write_record(self.folder / "run.json", record)
        self.publish(record)

    def publish(self, record: Record) -> None:
        """Draw the plots and write the page."""
        plots = [path.relative_to(self.args.out) for path in draw(self.rows, self.folder)]
        notes = self.folder / "notes.md"
        text = notes.read_text(encoding="utf-8") if notes.exists() else ""
        page = write_report(self.rows, record, plots=plots, notes=text)
        (self.args.out / "benchmarks.md").write_text(page, encoding="utf-8")


def _print_plan(schedule: JobOrder, costs: Durations) -> None:
    rows = [
        (
            job.round + 1,
            job.mode,
            job.system,
            ", ".join(f"{t.steps} x {t.accumulation}/{t.network}" for t in job.timed),
            f"{costs.job_s(job):.0f}",
        )
        for job in schedule.jobs
    ]
    print(tabulate(rows, headers=["round", "mode", "system", "steps x accumulation/network", "s"]))
    for skipped in schedule.skipped:
        print("left out:", *Cell(*skipped.cell), f"({skipped.step_s:.0f} s a step)")
    print(f"{len(schedule.jobs)} launches, about {schedule.expected_s / 60:.0f} minutes")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line asks; returns the exit code."""
    args = parse(argv)
    try:
        bench = Bench(args)
    except ValueError as error:
        _say(f"make bench: {error}")
        return 2
    if args.action == "report":
        record = read_record(bench.folder / "run.json")
        if record is None:
            _say(
                f"make bench: there are no results in {bench.folder}; run it without --report first"
            )
            return 2
        bench.publish(record)
        return 0
    schedule = bench.schedule()
    if args.action == "plan":
        _print_plan(schedule, bench.costs)
        return 0
    if (reason := why_not()) is not None:
        _say(f"make bench: {reason}")
        return 1
    bench.run(schedule)
    _say(f"wrote {Path(args.out) / 'benchmarks.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
