"""What graph breaks and layers that share a trace cost, on 2 x 2 simulated ranks: seconds, bytes, starts.

    python -m benchmarks.seams                              every system, with LoRA and in full
    python -m benchmarks.seams --systems fcdp fcdp-layers --rounds 1
    python -m benchmarks.seams --starts 4 24 80             the first steps of deeper models, too

All systems train the same model on the same data, with ATen's kernels where nothing else is said.  They take
turns, round by round, and within a launch the networks do, step by step.  Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median

from tabulate import tabulate

from benchmarks.cluster.nodes import why_not
from benchmarks.launch import ROOT, run_job
from benchmarks.reporting.rows import Failure, ResultRow, write_records
from benchmarks.reporting.summary import summarise
from benchmarks.running.job import BenchmarkJob, TimedSteps
from benchmarks.running.machine import MachineRecord
from benchmarks.running.network import NETWORKS
from benchmarks.systems.names import BY_NAME, SEAMS
from benchmarks.systems.shape import Shape

SYSTEMS = ("fcdp", *(system.name for system in SEAMS), "fsdp2")
STARTS = ("fcdp", "fcdp-layers", "fsdp2", "fsdp2-compiled")
TIMEOUT_S = 900.0


def main() -> int:
    """Measure, and print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description="Graph breaks, and layers that share a trace.")
    add = parser.add_argument
    add("--systems", nargs="*", choices=BY_NAME, default=list(SYSTEMS))
    add("--modes", nargs="+", choices=("full", "lora"), default=["full", "lora"])
    add("--networks", nargs="+", choices=NETWORKS, default=["unlimited", "1gbit", "100mbit"])
    add("--rounds", type=int, default=2, help="passes over all systems (%(default)s)")
    add("--steps", type=int, default=3, help="timed steps of a launch on a network (%(default)s)")
    add("--starts", type=int, nargs="*", default=[], help="layers of models whose start is timed")
    add("--out", type=Path, default=ROOT / "build" / "seams", help="folder of rows and logs")
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    failures: list[Failure] = []
    rows: list[ResultRow] = []
    for job in _steps(args):
        rows += _run(job, args.out, failures)
    write_records(args.out / "rows.json", rows)
    for mode in args.modes if rows else ():
        print(f"\n{mode}\n{steps_table([row for row in rows if row.mode == mode])}")
    first_s: dict[str, dict[int, float]] = {}
    for system in STARTS if args.starts else ():
        for layers in args.starts:
            job = _job(system, "full", Shape(layers=layers, width=128), 0, {"unlimited": 1})
            for row in _run(job, args.out, failures)[:1]:
                first_s.setdefault(system, {})[layers] = row.first_step_s
    if first_s:
        print(f"\nstarts\n{starts_table(first_s)}")
    for failure in failures:
        print(f"{failure.system} does not run: {failure.why}")
    print(MachineRecord.here())
    return 1 if failures else 0


def _steps(args: argparse.Namespace) -> Iterator[BenchmarkJob]:
    for number in range(args.rounds):
        for mode in args.modes:
            for system in args.systems:
                yield _job(system, mode, Shape(), number, dict.fromkeys(args.networks, args.steps))


def _job(system: str, mode: str, shape: Shape, number: int, steps: dict[str, int]) -> BenchmarkJob:
    return BenchmarkJob(
        system=system,
        mode=mode,
        round=number,
        shape=shape,
        nodes=2,
        ranks_per_node=2,
        check_steps={1: 3},
        timed=[TimedSteps(accumulation=1, network=n, steps=k) for n, k in steps.items()],
    )


def _run(job: BenchmarkJob, folder: Path, failures: list[Failure]) -> list[ResultRow]:
    found = run_job(job, folder=folder, timeout_s=TIMEOUT_S)
    print(
        f"round {job.round + 1}: {job.system}, {job.mode}, {job.shape.layers} layers",
        file=sys.stderr,
        flush=True,
    )
    if isinstance(found, Failure):
        failures.append(found)
        return []
    return found


def steps_table(rows: Sequence[ResultRow]) -> str:
    """A line for each system; seconds are medians, in brackets as a multiple of the first system's."""
    cells = {(c.cell.system, c.cell.network): c for c in summarise(rows).values()}
    networks = list(dict.fromkeys(row.network for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    lines = []
    for system in systems:
        mine = {n: cells[system, n] for n in networks}
        seconds = {
            f"step s, {name}": f"{c.step_s:.2f} ({c.step_s / cells[systems[0], name].step_s:.2f})"
            for name, c in mine.items()
        }
        first_s = [row.first_step_s for row in rows if row.system == system]
        lines.append(
            {
                "": BY_NAME[system].title,
                "sent MB": f"{mean(c.sent_bytes for c in mine.values()) / 1e6:.2f}",
                "device MiB": f"{max(c.heap_bytes for c in mine.values()) / 2**20:.0f}",
                "host MiB": f"{max(c.host_bytes for c in mine.values()) / 2**20:.0f}",
                "loss": f"{mine[networks[0]].loss:.5f}",
                **seconds,
                "first step s": f"{median(first_s):.1f}",
            }
        )
    return tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True)


def starts_table(first_s: dict[str, dict[int, float]]) -> str:
    """Seconds of the first step by system and layers, in brackets as a multiple of the fewest layers'."""
    lines = []
    for system, by_layers in first_s.items():
        least = by_layers[min(by_layers)]
        cells = {f"{n} layers": f"{s:.1f} ({s / least:.2f})" for n, s in by_layers.items()}
        lines.append({"": BY_NAME[system].title, **cells})
    return tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    sys.exit(main())
