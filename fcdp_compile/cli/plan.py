"""`fcdp plan`: memory, bytes and time of every strategy on a cluster that need not exist.

`fcdp simulate` takes the same arguments: a model, a cluster, the size of a step (`add_job_arguments`).
"""

from __future__ import annotations

import argparse
import importlib

from fcdp_compile.cli.command import Answer, Declared, kind, several, strategy, whole
from fcdp_compile.cluster.model_table import MODELS
from fcdp_compile.cluster.profile import CLUSTERS
from fcdp_compile.cluster.requests import DTYPES, PACKED_FORMATS
from fcdp_compile.errors import ArgumentError
from fcdp_compile.strategy.formats import DELTA_BITS

SUMMARY = "rank the strategies for a model on a cluster, without weights or the cluster"
DESCRIPTION = (
    "Trace a model on fake tensors, make the plan of every strategy for a cluster's profile, and rank them: "
    "memory, bytes between nodes, predicted time.  Needs no GPU, no weights and no cluster; exit code 1 if "
    "nothing fits."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fcdp plan`."""
    add_job_arguments(parser)
    Declared(parser).form(json="an object with rows, recommended and why")


def run(options: argparse.Namespace) -> Answer:
    """Plan and rank.

    Raises: FcdpError for a request that cannot be planned; OSError for a file that cannot be read.
    """
    return Answer(*importlib.import_module("fcdp_compile.tools.planner.command").plan(options))


def add_job_arguments(parser: argparse.ArgumentParser, *, are_nodes_required: bool = True) -> None:
    """Declare the arguments that describe a job: a model on a cluster, and the step that it trains."""
    add = Declared(parser)
    add.value(
        "--model",
        str,
        "MODEL",
        "a Hugging Face config.json, a function your_module:build_fn(batch, seq) that returns a "
        f"model and its inputs, or one of {', '.join(MODELS)}",
        required=True,
    )
    clusters = f"a file that fcdp probe wrote, or one of {', '.join(CLUSTERS)}"
    add.value("--cluster", str, "PROFILE", clusters, required=True)
    nodes = "number of nodes of the cluster"
    add.value("--nodes", whole, "N", nodes, required=are_nodes_required)
    ranks = "ranks of each node (default: as many as a node of the cluster has)"
    add.value("--gpus-per-node", whole, "g", ranks)
    _add_step_arguments(add)
    inner = "how many ranks of a node share each {}; several numbers are all planned: 1,2,4"
    add.value("--cp", several(whole), "c,…", inner.format("sequence"), default="1")
    add.value("--tp", several(whole), "t,…", inner.format("parameter"), default="1")
    parser.add_argument(
        "--strategy",
        type=several(strategy),
        default=(),
        metavar="a,b,c",
        help="only these strategies, with or without modifiers: zero3,fcdp+w8 (default: all that "
        "behave differently for this job)",
    )


def _add_step_arguments(add: Declared) -> None:
    add.value("--batch", whole, "SAMPLES", "samples of a micro-batch on each GPU", default=1)
    add.value("--seq", whole, "TOKENS", "tokens of a sample", default=1024)
    lora = "train adapters of this rank on a frozen model (default: no adapters)"
    add.value("--lora", whole, "r", lora)
    add.choice(
        "--quantise",
        PACKED_FORMATS,
        "pack the frozen linear layers below adapters as bitsandbytes does (default: they are not "
        "quantised)",
    )
    add.value("--accumulate", whole, "s", "micro-batches of an optimizer step", default=1)
    dtype = "dtype of computation and of gathers; trained weights are kept in fp32"
    add.choice("--dtype", DTYPES, dtype, default="bf16")
    bits = "with +delta, bits of a weight that crosses between nodes; 1.0 to 3.4 were measured"
    add.value("--delta-bits", _bits, "BITS", bits, default=DELTA_BITS)
    attention = "attention: fused, or as separate matrix products"
    add.choice("--attention", ("sdpa", "eager"), attention, default="sdpa")
    keep = "keep all activations; by default each layer's are recomputed in the backward"
    add.flag("--no-checkpointing", keep)


@kind
def _bits(text: str) -> float:
    bits = float(text)
    if not 1 <= bits <= 16:
        raise ArgumentError(f"a weight takes 1 to 16 bits, not {text}")
    return bits
