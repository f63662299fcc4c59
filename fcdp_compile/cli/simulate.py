"""`fcdp simulate`: the rows of `fcdp plan`, under conditions, and over sweeps."""

from __future__ import annotations

import argparse
import importlib

from fcdp_compile.cli.command import Answer, Declared, kind, whole
from fcdp_compile.cli.plan import add_job_arguments
from fcdp_compile.cluster.quantities import parse_bytes_per_s
from fcdp_compile.cluster.requests import Sweep
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.tools.simulator.conditions import Conditions
from fcdp_compile.tools.simulator.rings import Collectives

SUMMARY = "replay plans on a cluster: stragglers, jitter, sweeps over nodes or bandwidth"
DESCRIPTION = (
    "Replay the plans of strategies on a cluster's profile, event by event: five lanes per rank, with "
    "shared network cards and host links.  Takes the arguments of fcdp plan and prints the same rows."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fcdp simulate`."""
    add_job_arguments(parser, are_nodes_required=False)
    parser.add_argument(
        "--collectives",
        choices=[c.value for c in Collectives],
        default=Collectives.HIERARCHICAL.value,
        help="hierarchical: as planned; ring: as in systems that use one NCCL group for all ranks",
    )
    for name, what in (
        ("--straggler", "compute of this many nodes takes FACTOR times as long"),
        ("--slow-link", "network cards of this many nodes have FACTOR times the bandwidth"),
    ):
        more = f"{what}; may be repeated"
        parser.add_argument(
            name, action="append", type=_pair, default=[], metavar="NODES:FACTOR", help=more
        )
    jitter = "standard deviation of each compute step on each node, relative to its time"
    parser.add_argument("--jitter", type=float, default=0.0, metavar="PART", help=jitter)
    add = Declared(parser)
    add.value("--seed", int, None, "seed of the jitter", default=0)
    add.value(
        "--sweep",
        _sweep,
        "nodes=2,4,… or bandwidth=1G,10G,…",
        "sweep over numbers of nodes, instead of --nodes, or over bandwidths of a node's card",
    )
    add.value("--plot", str, "FILE", "draw a sweep as FILE.svg or FILE.png (needs matplotlib)")
    add.form(json="as fcdp plan prints it, a sweep as a list under sweep", csv="one line a row")


def run(options: argparse.Namespace) -> Answer:
    """Simulate.

    Raises: FcdpError if the request cannot be planned or drawn; OSError if a file cannot be read or written.
    """
    if options.nodes is None:
        if options.sweep is None or options.sweep.of != "nodes":
            raise FcdpError("give --nodes, or sweep over them, such as --sweep nodes=2,4,8")
        options.nodes = int(options.sweep.values[0])
    if options.plot is not None and options.sweep is None:
        raise FcdpError("--plot draws a sweep; give --sweep too, such as --sweep nodes=2,4,8")
    try:
        conditions = Conditions(
            stragglers=tuple(options.straggler),
            slow_links=tuple(options.slow_link),
            jitter=options.jitter,
            seed=options.seed,
        )
    except ValueError as error:
        raise FcdpError(str(error)) from None
    command = importlib.import_module("fcdp_compile.tools.planner.command")
    return Answer(*command.simulate(options, conditions))


def _pair(text: str) -> tuple[int, float]:
    count, _, factor = text.partition(":")
    try:
        return int(count), float(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of nodes and a factor, such as 1:1.5"
        ) from None


@kind
def _sweep(text: str) -> Sweep:
    of, _, values = text.partition("=")
    texts = tuple(v.strip() for v in values.split(",") if v.strip())
    if of not in ("nodes", "bandwidth") or not texts:
        raise ArgumentError(f"{text!r} is not a sweep; give nodes=2,4,8 or bandwidth=1G,10G,100G")
    if of == "nodes":
        return Sweep(of=of, values=tuple(map(whole, texts)), texts=texts)
    try:
        return Sweep(of=of, values=tuple(map(parse_bytes_per_s, texts)), texts=texts)
    except ValueError as error:
        raise ArgumentError(f"bandwidth {error}") from None
