"""QLoRA with fcdp and its peers on 2 x 2 simulated ranks: bytes, seconds, memory and losses.

    python -m benchmarks.qlora                              every system, unlimited and 100 Mbit/s
    python -m benchmarks.qlora --systems ddp fcdp --rounds 1

All systems train the same Llama, NF4 with double quantisation and LoRA, on the same data, in fp32.  The
systems take turns, round by round, and within a launch the networks do, step by step.  Needs root and
iproute2; DeepSpeed only for its own systems.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from statistics import mean

from tabulate import tabulate

from benchmarks.cluster.nodes import why_not
from benchmarks.launch import ROOT, run_job
from benchmarks.reporting.rows import Failure, ResultRow, read_rows, write_records
from benchmarks.reporting.summary import REFERENCE, summarise
from benchmarks.running.job import BenchmarkJob, TimedSteps
from benchmarks.running.machine import MachineRecord
from benchmarks.running.network import NETWORKS
from benchmarks.systems.names import BY_NAME
from benchmarks.systems.shape import Shape

SYSTEMS = ("ddp", "fcdp", "fcdp-mics", "fsdp2", "fsdp2-node", "hsdp", "ds-zero3", "ds-hpz")
TIMEOUT_S = 600.0


def main() -> int:
    """Measure, and print the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="QLoRA with fcdp and its peers.")
    add = parser.add_argument
    add("--systems", nargs="+", choices=BY_NAME, default=list(SYSTEMS))
    add("--networks", nargs="+", choices=NETWORKS, default=["unlimited", "100mbit"])
    add("--layers", type=int, default=4)
    add("--width", type=int, default=1024)
    add("--rounds", type=int, default=3, help="passes over all systems (%(default)s)")
    add("--steps", type=int, default=2, help="timed steps of a launch on a network (%(default)s)")
    add("--out", type=Path, default=ROOT / "build" / "qlora", help="folder of rows and logs")
    add("--report", action="store_true", help="only print the table of the rows in --out again")
    args = parser.parse_args()
    if args.report:
        print(table(read_rows(args.out / "rows.json")))
        return 0
    if (reason := why_not()) is not None:
        print(reason, file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[ResultRow] = []
    failures: list[Failure] = []
    for number in range(args.rounds):
        for system in args.systems:
            job = BenchmarkJob(
                system=system,
                mode="qlora",
                round=number,
                shape=Shape(layers=args.layers, width=args.width, vocabulary=256, length=64),
                nodes=2,
                ranks_per_node=2,
                check_steps={1: 3},
                timed=[
                    TimedSteps(accumulation=1, network=name, steps=args.steps)
                    for name in args.networks
                ],
            )
            found = run_job(job, folder=args.out, timeout_s=TIMEOUT_S)
            failures += [found] if isinstance(found, Failure) else []
            rows += [] if isinstance(found, Failure) else found
            print(f"round {number + 1}: {system}", file=sys.stderr, flush=True)
    write_records(args.out / "rows.json", rows)
    print(table(rows))
    for failure in failures:
        print(f"{failure.system} does not run: {failure.why}")
    print(MachineRecord.here())
    return 1 if failures else 0


def table(rows: Sequence[ResultRow]) -> str:
    """A line for each system; seconds are medians, with the fastest and the slowest step."""
    cells = summarise(rows)
    networks = list(dict.fromkeys(row.network for row in rows))
    lines = []
    for system in dict.fromkeys(row.system for row in rows):
        mine = [cell for cell in cells.values() if cell.cell.system == system]
        of_network = {cell.cell.network: cell for cell in mine}
        first = [b for row in rows if row.system == system for b in row.first_sent_bytes]
        seconds = {
            f"step s, {name}": f"{c.step_s:.2f} ({c.least_s:.2f} – {c.most_s:.2f}, n={c.n})"
            for name in networks
            if (c := of_network.get(name)) is not None
        }
        lines.append(
            {
                "": BY_NAME[system].title,
                "sharded over": BY_NAME[system].state.value,
                "first step sent MB": f"{mean(first) / 1e6:.2f}",
                "later step sent MB": f"{mean(c.sent_bytes for c in mine) / 1e6:.2f}",
                **seconds,
                "memory MiB": round(max(c.heap_bytes for c in mine) / 2**20),
                "host MiB": round(max(c.host_bytes for c in mine) / 2**20),
                "loss against DDP's": _difference(rows, system),
            }
        )
    sizes = {(row.all_bytes, row.trained_bytes) for row in rows}
    said = [f"weights {a / 1e6:.2f} MB, of them adapters {t / 1e6:.2f} MB" for a, t in sizes]
    return "\n".join(
        [tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True), *said]
    )


def _difference(rows: Sequence[ResultRow], system: str) -> str:
    """The largest relative difference of a loss from the reference's; "–" without a reference."""
    references = [row.check_losses for row in rows if row.system == REFERENCE]
    if not references:
        return "–"
    pairs = [
        pair
        for row in rows
        if row.system == system
        for pair in zip(row.check_losses, references[0], strict=True)
    ]
    found = [abs(loss - right) / abs(right) for loss, right in pairs]
    return "NaN" if any(map(isnan, found)) else f"{max(found):.1e}"


if __name__ == "__main__":
    sys.exit(main())
