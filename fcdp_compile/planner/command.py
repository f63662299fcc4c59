"""What `fcdp plan` and `fcdp simulate` do with their arguments; imported when one of them was chosen."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

import torch

from fcdp_compile.cli.answer import Answer
from fcdp_compile.cli.job_arguments import DTYPES
from fcdp_compile.cluster import find_profile
from fcdp_compile.planner import traced_model
from fcdp_compile.planner.job import Job
from fcdp_compile.planner.ranking import estimates, rank, sensible
from fcdp_compile.planner.ranking_table import ranking_record, ranking_text
from fcdp_compile.planner.source import ModelOptions, find_source
from fcdp_compile.planner.traced import TracedModel
from fcdp_compile.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A traced model, the job it is planned for, and the strategies that were named, if any."""

    traced: TracedModel
    job: Job
    strategies: tuple[Strategy, ...]


def plan(options: argparse.Namespace) -> Answer:
    """Plan and rank.

    Raises: FcdpError for what cannot be planned; OSError for a file that cannot be read.
    """
    found = asked(options)
    strategies = found.strategies or sensible(found.job)
    note = lambda name: tell(f"planning {name}")  # noqa: E731
    ranking = rank(estimates(found.traced, strategies, found.job, note=note))
    code = 0 if ranking.recommended else 1
    if options.format == "json":
        return Answer(json.dumps(ranking_record(ranking), indent=1), code)
    return Answer(ranking_text(ranking, found.job), code)


def asked(options: argparse.Namespace) -> Asked:
    """Read the arguments, and trace the model if no trace of it was kept.

    Raises: FcdpError for a model, cluster or job that cannot be planned; OSError for a file that cannot be
    read.
    """
    profile = find_profile(options.cluster)
    job = Job(
        profile=profile,
        nodes=options.nodes,
        ranks_per_node=options.gpus_per_node or profile.ranks_per_node,
        batch=options.batch,
        accumulate=options.accumulate,
    )
    model_options = ModelOptions(
        seq=options.seq,
        dtype=getattr(torch, DTYPES[options.dtype]),
        lora=options.lora,
        checkpointing=not options.no_checkpointing,
        attention=options.attention,
    )
    source = find_source(options.model, model_options)
    tell(f"tracing {source.name}, unless it was traced before")
    return Asked(traced=traced_model(source, model_options), job=job, strategies=options.strategy)


def tell(text: str) -> None:
    """Say what takes its time, where a person is looking."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"fcdp: {text} ...", file=sys.stderr, flush=True)  # noqa: T201
