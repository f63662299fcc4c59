"""Compare two all-gathers: hierarchical and HO-Ring, of one bucket and of several in a row.

On simulated lanes also reduce-scatters are compared: hierarchical, and as HO-Ring would do them.

    python -m benchmarks.gathering                 measured on 2 x 2 ranks between simulated nodes
    python -m benchmarks.gathering --simulate      16 x 8 ranks on simulated lanes

The measured gathers have nothing else beside them.  `alone`: each gather ends before the next starts.
`in a row`: a few gathers are started ahead, as in a schedule.  Algorithms take turns, so that other load on
the machine slows all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate

import fcdp_compile
from benchmarks.cluster.nodes import why_not
from benchmarks.launch import ROOT, cluster_command
from benchmarks.running.network import NETWORKS, cap, sent_bytes
from fcdp_compile.core.params.layout import ParamLayout
from fcdp_compile.core.params.mesh import topology_of
from fcdp_compile.devices import Cpu
from fcdp_compile.plan import (
    Bucket,
    BucketParam,
    Direction,
    Kind,
    Schedule,
    Step,
    Variant,
)
from fcdp_compile.plan.cost import MACHINES, Link, Machine
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.strategy import PRESETS, Algorithm
from fcdp_compile.strategy.formats import Format
from fcdp_compile.tools.simulator import simulate

ALGORITHMS = (Algorithm.HIERARCHICAL, Algorithm.HO_RING)
MIB = (1, 4, 16, 64)
IN_A_ROW, AHEAD = 8, 3
ROUNDS = 5


def main() -> None:
    """Measure or simulate, and print a table."""
    parser = argparse.ArgumentParser(description="Algorithms of all-gathers between nodes.")
    parser.add_argument("--simulate", action="store_true", help="16 x 8 ranks on simulated lanes")
    parser.add_argument("--network", choices=NETWORKS, default="1gbit")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.simulate:
        print(_simulated())
    elif arguments.worker:
        _work(arguments.worker, arguments.network)
    else:
        print(_measured(arguments.network))


# --- measured ------------------------------------------------------------------------------------------


def _measured(network: str) -> str:
    if (why := why_not()) is not None:
        sys.exit(why)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = cluster_command(2, 2, timeout_s=900, logs=Path(folder) / "logs")
        command += [__file__, "--network", network, "--worker", str(found)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        rows = json.loads(found.read_text())
    names = [a.value for a in ALGORITHMS]
    table = []
    for mib, how, times, sent in rows:
        first = times[names[0]]
        shown = [f"{1e3 * times[n]:.1f} ms ({times[n] / first:.2f})" for n in names]
        table.append([f"{mib} MiB {how}", *shown, *(f"{sent[n] / 2**20:.2f}" for n in names)])
    headers = ["bucket", *names, *(f"sent by a node [MiB], {n}" for n in names)]
    return tabulate(table, headers=headers, tablefmt="github")


def _work(found: Path, network: str) -> None:
    mesh = fcdp_compile.make_mesh(nodes=2)
    assert mesh is not None
    topology = topology_of(mesh)
    lanes = Lanes.shared(topology, Cpu(), is_blocking=True)
    collectives = Collectives(topology, Counters(), lanes)
    if topology.place == 0:
        cap(NETWORKS[network])
    dist.barrier()
    rows = []
    for mib in MIB:
        home = torch.rand(mib * 2**20 // 4 // topology.ranks)
        for how, gather in (("alone", _alone), ("in a row", _in_a_row)):
            times: dict[str, list[float]] = {a.value: [] for a in ALGORITHMS}
            sent: dict[str, float] = {}
            for _ in range(ROUNDS):
                for algorithm in ALGORITHMS:
                    seconds, sent[algorithm.value] = _time(gather, collectives, home, algorithm)
                    times[algorithm.value].append(seconds)
            medians = {name: statistics.median(t) for name, t in times.items()}
            rows.append((mib, how, medians, sent))
    if dist.get_rank() == 0:
        found.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _time(
    gather: Callable[[Collectives, torch.Tensor, Algorithm], None],
    collectives: Collectives,
    home: torch.Tensor,
    algorithm: Algorithm,
) -> tuple[float, float]:
    """Return the seconds of one gather and the bytes that the node sends for it."""
    dist.barrier()
    before, began = sent_bytes(), time.perf_counter()
    gather(collectives, home, algorithm)
    dist.barrier()
    seconds = time.perf_counter() - began
    return seconds / IN_A_ROW, (sent_bytes() - before) / IN_A_ROW


def _alone(collectives: Collectives, home: torch.Tensor, algorithm: Algorithm) -> None:
    for _ in range(IN_A_ROW):
        start(collectives, home, algorithm).wait()


def _in_a_row(collectives: Collectives, home: torch.Tensor, algorithm: Algorithm) -> None:
    under_way: list[Pending] = []
    for _ in range(IN_A_ROW):
        if len(under_way) == AHEAD:
            under_way.pop(0).wait()
        under_way.append(start(collectives, home, algorithm))
    for pending in under_way:
        pending.wait()


def start(collectives: Collectives, home: torch.Tensor, algorithm: Algorithm) -> Pending:
    """Start an all-gather of home buffers [S] to [G*S]."""
    node = collectives.all_gather(Kind.INTER_ALL_GATHER, home, "inter")
    if algorithm is Algorithm.HIERARCHICAL:
        return collectives.all_gather(Kind.INTRA_ALL_GATHER, node, "intra")
    own = collectives.own_all_gather(Kind.INTRA_OWN_ALL_GATHER, home, "own")
    return collectives.rest_all_gather(Kind.INTRA_REST_ALL_GATHER, node, own, "rest")


# --- simulated -----------------------------------------------------------------------------------------

NODES, RANKS_PER_NODE, LAYERS = 16, 8, 40
LAYER_BYTES = 2 * 12 * 4096**2  # of a 7 B model, in bf16
INTER_GBIT, INTRA_GBYTE = (10, 100, 400, 1600), (20, 200)


def _simulated() -> str:
    rows = []
    for gbit in INTER_GBIT:
        for gbyte in INTRA_GBYTE:
            base = MACHINES["cuda"]
            machine = Machine(
                inter=Link(latency_s=base.inter.latency_s, bytes_per_s=gbit / 8 * 1e9),
                intra=Link(latency_s=base.intra.latency_s, bytes_per_s=gbyte * 1e9),
                h2d=base.h2d,
                d2h=base.d2h,
                flops_per_s=base.flops_per_s,
                memory_bytes_per_s=base.memory_bytes_per_s,
            )
            for layers, how in ((1, "alone"), (LAYERS, "in a row")):
                gathers = [schedule_of(_add_gather, a, layers) for a in ALGORITHMS]
                reductions = [schedule_of(_add_reduction, a, layers) for a in ALGORITHMS]
                row = [f"{gbit} Gbit/s, {gbyte} GB/s", how]
                for schedules in (gathers, reductions):
                    times = [
                        simulate(x, machine, RANKS_PER_NODE).total_s / layers for x in schedules
                    ]
                    row += [f"{1e3 * t:.2f} ms ({t / times[0]:.3f})" for t in times]
                rows.append(row)
    headers = ["between nodes, within", "a layer", *(a.value for a in ALGORITHMS)]
    headers += [f"reduce-scatter, {a.value}" for a in ALGORITHMS]
    return tabulate(rows, headers=headers, tablefmt="github")


def schedule_of(
    add: Callable[[list[Step], Algorithm], None], algorithm: Algorithm, layers: int
) -> Schedule:
    """Return a schedule with the collectives of `layers` layers in a row."""
    steps: list[Step] = []
    for _ in range(layers):
        add(steps, algorithm)
    return Schedule(
        direction=Direction.FORWARD, variant=Variant.COLD, steps=tuple(steps), in_flight_bytes=0
    )


def _add_gather(steps: list[Step], algorithm: Algorithm) -> None:
    bucket = _layer(algorithm)
    between, within = NODES - 1, RANKS_PER_NODE - 1
    own, copied = bucket.slot_bytes, 2 * bucket.full_bytes
    add = partial(_add, steps)
    inter = add(Kind.INTER_ALL_GATHER, between * own)
    if algorithm is Algorithm.HIERARCHICAL:
        add(Kind.INTRA_ALL_GATHER, within * NODES * own, inter)
        return
    mine = add(Kind.INTRA_OWN_ALL_GATHER, within * own)
    add(Kind.INTRA_REST_ALL_GATHER, within * between * own, inter, mine, copied=copied)


def _add_reduction(steps: list[Step], algorithm: Algorithm) -> None:
    """Add a reduce-scatter of gradients, within the node and then between nodes.

    HO-Ring's is its all-gather backwards: the node sums the gradients that other nodes own, and while these
    cross, its own part.  Adding the received sums to that part reads both and writes one: 3 parts `copied`.
    """
    bucket = _layer(algorithm)
    between, within, own = NODES - 1, RANKS_PER_NODE - 1, bucket.slot_bytes
    add = partial(_add, steps)
    if algorithm is Algorithm.HIERARCHICAL:
        whole = add(Kind.INTRA_REDUCE_SCATTER, within * NODES * own)
        add(Kind.INTER_REDUCE_SCATTER, between * own, whole)
        return
    others = add(Kind.INTRA_REDUCE_SCATTER, within * between * own)
    add(Kind.INTER_REDUCE_SCATTER, between * own, others)
    add(Kind.INTRA_REDUCE_SCATTER, within * own, copied=3 * own)


def _add(steps: list[Step], kind: Kind, sent: int, *waits: int, copied: int = 0) -> int:
    steps.append(
        Step(
            index=len(steps),
            kind=kind,
            lane=kind.lane,
            bucket=0,
            bytes=sent,
            waits=waits,
            accessed_bytes=copied,
        )
    )
    return len(steps) - 1


def _layer(algorithm: Algorithm) -> Bucket:
    layout = ParamLayout.of((LAYER_BYTES // 2 // 4096, 4096), NODES, RANKS_PER_NODE)
    return Bucket(
        id=0,
        strategy=PRESETS["zero3"],
        params=(BucketParam(name="layer", layout=layout, offset=0),),
        dtype="bfloat16",
        itemsize=2,
        reduce_dtype="bfloat16",
        reduce_itemsize=2,
        frozen=False,
        wire=Format.FULL,
        reduce_wire=Format.FULL,
        host_format=Format.FULL,
        algorithm=algorithm,
        why="one layer",
    )


if __name__ == "__main__":
    main()
