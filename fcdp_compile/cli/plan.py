"""`fcdp plan`: memory, bytes and time of every strategy on a cluster that need not exist."""

from __future__ import annotations

import argparse
import importlib

from fcdp_compile.cli.answer import Answer
from fcdp_compile.cli.job_arguments import add_job_arguments

SUMMARY = "rank the strategies for a model on a cluster, without weights or the cluster"
DESCRIPTION = (
    "Trace a model on fake tensors, make the plan of every strategy for a cluster's profile, and rank them: "
    "memory, bytes between nodes, predicted time.  Needs no GPU, no weights and no cluster; exit code 1 if "
    "nothing fits."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fcdp plan`."""
    add_job_arguments(parser)
    parser.add_argument(
        "--format",
        choices=("table", "json"),
        default="table",
        help="table: for reading (default); json: an object with rows, recommended and why",
    )


def run(options: argparse.Namespace) -> Answer:
    """Plan and rank.

    Raises: FcdpError for a request that cannot be planned; OSError for a file that cannot be read.
    """
    return Answer(*importlib.import_module("fcdp_compile.planner.command").plan(options))
