"""The work of `fcdp plan` and `fcdp simulate`; imported only when one of them runs."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from fcdp_compile.cluster.profile import find_profile
from fcdp_compile.cluster.requests import DTYPES, Sweep
from fcdp_compile.errors import FcdpError
from fcdp_compile.tools.planner import traced_model
from fcdp_compile.tools.planner.job import Job
from fcdp_compile.tools.planner.ranking import planned, rank
from fcdp_compile.tools.planner.ranking_table import (
    Point,
    check_plot,
    draw,
    shown,
    shown_sweep,
    title,
)
from fcdp_compile.tools.planner.source import ModelOptions, find_source
from fcdp_compile.tools.planner.traced import TracedModel
from fcdp_compile.tools.simulator import Collectives, Conditions

_BEGAN_S = time.monotonic()


def plan(options: argparse.Namespace) -> tuple[str, int]:
    """Plan and rank; return the text to print and the exit code.

    Raises: FcdpError for a request that cannot be planned; OSError for a file that cannot be read.
    """
    jobs = asked(options)
    ranking = rank(
        [e for traced, job in jobs for e in planned(traced, job, options.strategy, note=tell)]
    )
    return shown(options.format, ranking, _in_common(jobs)), 0 if ranking.recommended else 1


def simulate(options: argparse.Namespace, conditions: Conditions) -> tuple[str, int]:
    """Simulate the plans of strategies, once or for each value of a sweep; return the text and the exit code.

    Raises: FcdpError if the request cannot be planned or drawn; OSError if a file cannot be read or written.
    """
    collectives = Collectives(options.collectives)
    if options.plot is not None:
        check_plot(options.plot)
    jobs = asked(options)
    common = _in_common(jobs)
    sweep: Sweep | None = options.sweep
    rankings = []
    for value in [None] if sweep is None else sweep.values:
        try:
            plans = []
            for traced, given in jobs:
                job = given if sweep is None or value is None else _swept(given, sweep.of, value)
                tell(f"simulating {title(job)}")
                plans += planned(traced, job, options.strategy)
            rankings.append(rank(plans, collectives=collectives, conditions=conditions))
        except ValueError as error:  # conditions name more nodes than there are
            raise FcdpError(str(error)) from None
    code = 0 if any(r.recommended for r in rankings) else 1
    if sweep is None:
        return shown(options.format, rankings[0], common), code
    points = [Point(text=t, ranking=r) for t, r in zip(sweep.texts, rankings, strict=True)]
    if options.plot is not None:
        draw(options.plot, sweep.of, sweep.values, points, title(common))
    return shown_sweep(options.format, sweep.of, points, common), code


def _swept(job: Job, of: str, value: float) -> Job:
    """Return the job with another number of nodes, or another bandwidth of a node's card in bytes/s."""
    if of == "nodes":
        return replace(job, nodes=int(value))
    return replace(job, profile=job.profile.with_card(value))


Jobs = Sequence[tuple[TracedModel, Job]]
"""Jobs to plan, each with its traced model."""


def _in_common(jobs: Jobs) -> Job:
    """Return what all jobs have in common, for titles."""
    (_, first), *others = jobs
    return replace(first, cp=1, tp=1) if others else first


def asked(options: argparse.Namespace) -> Jobs:
    """Read the arguments, and trace the model unless a trace was saved: a job for each pair of "cp" and "tp".

    Raises: FcdpError for a model, cluster or job that cannot be planned; OSError if a file cannot be read.
    """
    profile = find_profile(options.cluster)
    jobs = [
        Job(
            profile=profile,
            nodes=options.nodes,
            ranks_per_node=options.gpus_per_node or profile.ranks_per_node,
            batch=options.batch,
            accumulate=options.accumulate,
            cp=cp,
            tp=tp,
            delta_bits=options.delta_bits,
        )
        for cp, tp in itertools.product(options.cp, options.tp)
    ]
    model_options = ModelOptions(
        seq=options.seq,
        dtype=getattr(torch, DTYPES[options.dtype]),
        lora=options.lora,
        quantise=options.quantise,
        checkpointing=not options.no_checkpointing,
        attention=options.attention,
    )
    if options.quantise is not None and max(options.tp) > 1:
        raise FcdpError(
            "nothing computes with parts of quantised weights; leave out --tp or --quantise"
        )
    source = find_source(options.model, model_options)
    return [
        (traced_model(source, model_options, cp=job.cp, tp=job.tp, note=tell), job) for job in jobs
    ]


def tell(text: str) -> None:
    """Print the stage that begins and the process's running time, if stderr is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        since_s = time.monotonic() - _BEGAN_S
        print(f"fcdp: {since_s:5.1f} s  {text}", file=sys.stderr, flush=True)  # noqa: T201
