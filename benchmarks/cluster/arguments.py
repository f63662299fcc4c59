"""The command line of `python -m benchmarks.cluster`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.cluster.nodes import MOST_NODES
from benchmarks.cluster.rates import read_rate
from benchmarks.cluster.trouble import CableCut, Slow, Straggler

PROGRAM = "python -m benchmarks.cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A job, the nodes it runs on, and the troubles that come over them.

    command: the script and its arguments, after any further arguments for torchrun.
    """

    command: list[str]
    nodes: int
    ranks_per_node: int
    bits_per_s: int | None
    cuts: list[CableCut]
    slow: list[Slow]
    stragglers: list[Straggler]
    timeout_s: float | None
    grace_s: float
    logs: Path | None
    as_json: bool

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MOST_NODES:
            raise ValueError(f"--nodes is between 1 and {MOST_NODES}, not {self.nodes}")
        if self.ranks_per_node < 1:
            raise ValueError(f"--ranks-per-node is at least 1, not {self.ranks_per_node}")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise ValueError(f"--timeout is above 0 seconds, not {self.timeout_s:g}")
        if self.grace_s < 0:
            raise ValueError(f"--grace is 0 seconds or more, not {self.grace_s:g}")
        slowed = [straggler.node for straggler in self.stragglers]
        named = [cut.node for cut in self.cuts] + [slow.node for slow in self.slow] + slowed
        for node in named:
            if node >= self.nodes:
                raise ValueError(
                    f"there is no node {node}; --nodes {self.nodes} makes nodes 0 to {self.nodes - 1}"
                )
        if len(set(slowed)) < len(slowed):
            raise ValueError("--straggler names a node twice")


def parse(argv: Sequence[str] | None = None) -> Request:
    """Read the command line; ends the process with 2 and a sentence if it makes no sense."""
    parser = _OneLineParser(
        prog=PROGRAM,
        description="Run a torchrun job on several nodes that all live on this machine: network namespaces "
        "joined by limited links. Prints what the first rank prints, then the bytes that crossed each link.",
        epilog="Exit codes: that of the job (of the node that failed first), 124 after --timeout, "
        "2 for what cannot be done here.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=int, default=2, help="number of nodes (default 2)")
    add("--ranks-per-node", type=int, default=1, metavar="G", help="ranks of each node (default 1)")
    add(
        "--bandwidth",
        type=_read(read_rate),
        metavar="RATE",
        help="what each card sends, and what it receives, at most: 100mbit, 1gbit, … (default none)",
    )
    _declare_trouble(parser)
    add(
        "--timeout", type=float, metavar="S", help="end the job after S seconds, with exit code 124"
    )
    add(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="once a node has failed, how long the others may take to end by themselves (default 30)",
    )
    add("--log-dir", type=Path, metavar="DIR", help="keep the output of all ranks there")
    add(
        "--format",
        choices=("table", "json"),
        default="table",
        help="json: stdout holds one JSON object alone, the job's output goes to stderr (default table)",
    )
    add("command", nargs="*", metavar="-- SCRIPT ...", help="the script and its arguments")
    given = parser.parse_args(argv)
    if not given.command:
        parser.error("no script; write it and its arguments after --")
    try:
        return Request(
            command=given.command,
            nodes=given.nodes,
            ranks_per_node=given.ranks_per_node,
            bits_per_s=given.bandwidth,
            cuts=given.cut,
            slow=given.slow,
            stragglers=given.straggler,
            timeout_s=given.timeout,
            grace_s=given.grace,
            logs=given.log_dir,
            as_json=given.format == "json",
        )
    except ValueError as error:
        parser.error(str(error))


def _declare_trouble(parser: argparse.ArgumentParser) -> None:
    """Declare the options for troubles of nodes while the job runs."""
    add = parser.add_argument
    add(
        "--cut",
        type=_read(CableCut.read),
        action="append",
        default=[],
        metavar="NODE@SECONDS[:SECONDS]",
        help="pull out a node's cable so long after all ranks have started; for good, or for so long",
    )
    add(
        "--slow",
        type=_read(Slow.read),
        action="append",
        default=[],
        metavar="NODE=RATE[@SECONDS]",
        help="another limit for a node's card, from the beginning, or so long after all ranks have started",
    )
    add(
        "--straggler",
        type=_read(Straggler.read),
        action="append",
        default=[],
        metavar="NODE=FRACTION",
        help="let the processes of a node run for this fraction of the time only",
    )


class _OneLineParser(argparse.ArgumentParser):
    """Reports a bad command line in one line; argparse would print the usage as well."""

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


class _read:
    """An option's type: calls a function, and raises ArgumentTypeError, whose message argparse shows."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function

    def __call__(self, text: str) -> Any:
        try:
            return self._function(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
