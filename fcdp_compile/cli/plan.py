"""`fcdp plan`: memory, bytes and time of every strategy on a cluster that need not exist.

`fcdp simulate` takes the same arguments: a model, a cluster, the size of a step (`add_job_arguments`).
"""

from __future__ import annotations

import argparse
import importlib

from fcdp_compile.cli.answer import Answer
from fcdp_compile.cluster.model_table import MODELS
from fcdp_compile.cluster.profile import CLUSTERS
from fcdp_compile.cluster.requests import DTYPES, PACKED_FORMATS
from fcdp_compile.strategy import Strategy

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
    return Answer(*importlib.import_module("fcdp_compile.tools.planner.command").plan(options))


def add_job_arguments(parser: argparse.ArgumentParser, *, are_nodes_required: bool = True) -> None:
    """Declare the arguments that describe a job: a model on a cluster, and the step that it trains."""
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a Hugging Face config.json, a function your_module:build_fn(batch, seq) that returns a "
        f"model and its inputs, or one of {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--cluster",
        required=True,
        metavar="PROFILE",
        help=f"a file that fcdp probe wrote, or one of {', '.join(CLUSTERS)}",
    )
    parser.add_argument(
        "--nodes",
        type=whole,
        required=are_nodes_required,
        metavar="N",
        help="number of nodes of the cluster",
    )
    parser.add_argument(
        "--gpus-per-node",
        type=whole,
        metavar="g",
        help="ranks of each node (default: as many as a node of the cluster has)",
    )
    _add_step_arguments(parser)


def _add_step_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch",
        type=whole,
        default=1,
        metavar="SAMPLES",
        help="samples of a micro-batch on each GPU (default: 1)",
    )
    parser.add_argument(
        "--seq",
        type=whole,
        default=1024,
        metavar="TOKENS",
        help="tokens of a sample (default: 1024)",
    )
    parser.add_argument(
        "--lora",
        type=whole,
        metavar="r",
        help="train adapters of this rank on a frozen model (default: no adapters)",
    )
    parser.add_argument(
        "--quantise",
        choices=list(PACKED_FORMATS),
        help="pack the frozen linear layers below adapters as bitsandbytes does (default: they are not "
        "quantised)",
    )
    parser.add_argument(
        "--accumulate",
        type=whole,
        default=1,
        metavar="s",
        help="micro-batches of an optimizer step (default: 1)",
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="bf16",
        help="dtype of computation and of gathers; trained weights are kept in fp32 (default: bf16)",
    )
    parser.add_argument(
        "--attention",
        choices=("sdpa", "eager"),
        default="sdpa",
        help="attention: fused, or as separate matrix products (default: sdpa)",
    )
    parser.add_argument(
        "--no-checkpointing",
        action="store_true",
        help="keep all activations; by default each layer's are recomputed in the backward",
    )
    _add_inner_arguments(parser)
    parser.add_argument(
        "--strategy",
        type=strategies,
        default=(),
        metavar="a,b,c",
        help="only these strategies, with or without modifiers: zero3,fcdp+w8 (default: all that "
        "behave differently for this job)",
    )


def _add_inner_arguments(parser: argparse.ArgumentParser) -> None:
    for name, what in (("cp", "sequence"), ("tp", "parameter")):
        parser.add_argument(
            f"--{name}",
            type=several,
            default=(1,),
            metavar=f"{name[0]},…",
            help=f"how many ranks of a node share each {what}; several numbers are all planned: 1,2,4 "
            "(default: 1)",
        )


def whole(text: str) -> int:
    """Parse a whole number above zero, for argparse."""
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def several(text: str) -> tuple[int, ...]:
    """Parse whole numbers above zero, separated by commas, for argparse."""
    return tuple(dict.fromkeys(whole(part.strip()) for part in text.split(",")))


def strategies(text: str) -> tuple[Strategy, ...]:
    """Parse names of strategies, separated by commas, for argparse."""
    try:
        found = [Strategy.parse(name.strip()) for name in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return tuple(dict.fromkeys(found))
