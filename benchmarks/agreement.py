"""The cost of the agreement of ranks before a forward: hops for clusters of any size, and measured times.

    python -m benchmarks.agreement FOLDER                              writes agreement.md and agreement.svg
    torchrun --nproc-per-node 8 -m benchmarks.agreement --nodes 4      times of a ring and of ours

The ring is Gloo's all-gather over all ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")  # needs no display; before pyplot
import matplotlib.pyplot as plt
import torch.distributed as dist
from tabulate import tabulate

from fcdp_compile.core.params.mesh import make_mesh, topology_of
from fcdp_compile.devices import Cpu
from fcdp_compile.plan.cost import MACHINES, agreement_hops, agreement_s
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes

_RANKS_PER_NODE = 8
_NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_TIMES = 100
_WORDS = [1] * 32


def table() -> str:
    """Return hops and predicted times for nodes of 8 ranks, as Markdown."""
    machine = MACHINES["cuda"]
    rows = []
    for nodes in _NODES:
        ranks = nodes * _RANKS_PER_NODE
        between, within = nodes if nodes > 1 else 0, ranks - 1
        # A ring over the ranks in order: `between` hops cross nodes, the others stay within a node.
        ring_s = between * machine.inter.latency_s + (within - between) * machine.intra.latency_s
        ours_s = agreement_s(machine, nodes, _RANKS_PER_NODE)
        ours = agreement_hops(ranks)
        rows.append((ranks, nodes, ranks - 1, ours, 1e3 * ring_s, 1e3 * ours_s))
    headers = ("ranks", "nodes", "hops, ring", "hops", "ring [ms]", "predicted [ms]")
    return tabulate(rows, headers, tablefmt="pipe", floatfmt=".2f")


def draw(path: Path) -> None:
    """Plot hops over ranks."""
    mpl.rcParams["svg.hashsalt"] = "fcdp"  # equal numbers give an equal file
    ranks = [n * _RANKS_PER_NODE for n in _NODES]
    figure, axis = plt.subplots(figsize=(6, 4))
    axis.plot(ranks, [r - 1 for r in ranks], marker="o", label="a ring over all ranks")
    ours = [agreement_hops(r) for r in ranks]
    axis.plot(ranks, ours, marker="o", label="to one rank, then down a tree")
    axis.set(
        xscale="log", yscale="log", xlabel="ranks, 8 a node", ylabel="hops one after the other"
    )
    axis.set_xticks(ranks, [str(r) for r in ranks])
    axis.minorticks_off()
    axis.grid(visible=True, alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write(folder: Path) -> None:
    """Write the page and its plot."""
    draw(folder / "agreement.svg")
    (folder / "agreement.md").write_text(
        "# How ranks agree before a forward\n\nBefore each forward all ranks compare the variants that "
        "they are about to run, and exchange which copies are stale.\nThe first rank gathers one message "
        "from each rank and broadcasts the result along Gloo's tree. Both run in Gloo's\nthreads. `python "
        "-m benchmarks.agreement docs/benchmarks` writes this page. The times are not measured: they "
        "are\nthe number of hops times the latencies that the cost model assumes for a GPU cluster, 50 µs "
        f"between nodes and 20 µs\nwithin a node.\n\n![Hops over ranks](agreement.svg)\n\n{table()}\n"
    )


def _measure(nodes: int) -> None:
    topology = topology_of(make_mesh(nodes=nodes))
    lanes = Lanes.shared(topology, Cpu(), is_blocking=True)
    collectives = Collectives(topology, Counters(), lanes)
    ways: dict[str, Callable[[], object]] = {
        "ring": lambda: collectives.agree(_WORDS),
        "ours": lambda: collectives.tell(_WORDS, "a measurement").finish(),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TIMES):
        for name, agree in ways.items():  # in turns: other load slows both alike
            began = time.perf_counter()
            agree()
            found[name].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        for name, times in found.items():
            print(f"{name}: {1e3 * statistics.median(times):.3f} ms (median of {_TIMES})")
    dist.destroy_process_group()


def main() -> None:
    """Write the page, or measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--nodes", type=int, help="measure among the ranks that torchrun started")
    args = parser.parse_args()
    if args.nodes is not None:
        _measure(args.nodes)
    elif args.folder is not None:
        write(args.folder)
    else:
        parser.error("give a folder to write to, or --nodes within torchrun")


if __name__ == "__main__":
    main()
