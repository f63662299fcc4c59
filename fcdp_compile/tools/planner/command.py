"""The work of `fcdp plan` and `fcdp simulate`; imported only when one of them runs."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fcdp_compile.cluster.profile import find_profile
from fcdp_compile.cluster.requests import DTYPES, Sweep
from fcdp_compile.errors import FcdpError
from fcdp_compile.strategy import Strategy
from fcdp_compile.tools.planner import traced_model
from fcdp_compile.tools.planner.job import Job
from fcdp_compile.tools.planner.ranking import Ranking, planned, rank
from fcdp_compile.tools.planner.ranking_table import (
    Point,
    ranking_record,
    ranking_text,
    rows_csv,
    sweep_text,
    title,
)
from fcdp_compile.tools.planner.source import ModelOptions, find_source
from fcdp_compile.tools.planner.sweep_plot import check_plot, draw
from fcdp_compile.tools.planner.traced import TracedModel
from fcdp_compile.tools.simulator import Collectives, Conditions

_BEGAN_S = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The jobs to plan, each with its traced model, and the strategies that were named, if any.

    jobs: one for each pair of sizes of "cp" and "tp".
    """

    jobs: tuple[tuple[TracedModel, Job], ...]
    strategies: tuple[Strategy, ...]

    @property
    def job(self) -> Job:
        """What all jobs have in common, for titles."""
        jobs = [job for _, job in self.jobs]
        return jobs[0] if len(jobs) == 1 else replace(jobs[0], cp=1, tp=1)


def plan(options: argparse.Namespace) -> tuple[str, int]:
    """Plan and rank; return the text to print and the exit code.

    Raises: FcdpError for a request that cannot be planned; OSError for a file that cannot be read.
    """
    found = asked(options)
    ranking = rank(
        [e for traced, job in found.jobs for e in planned(traced, job, found.strategies, note=tell)]
    )
    code = 0 if ranking.recommended else 1
    if options.format == "json":
        return json.dumps(ranking_record(ranking), indent=1), code
    return ranking_text(ranking, found.job), code


def simulate(options: argparse.Namespace, conditions: Conditions) -> tuple[str, int]:
    """Simulate the plans of strategies, once or for each value of a sweep; return the text and the exit code.

    Raises: FcdpError if the request cannot be planned or drawn; OSError if a file cannot be read or written.
    """
    collectives = Collectives(options.collectives)
    if options.plot is not None:
        check_plot(options.plot)
    found = asked(options)
    sweep: Sweep | None = options.sweep
    rankings = []
    for value in [None] if sweep is None else sweep.values:
        try:
            plans = []
            for traced, given in found.jobs:
                job = given if sweep is None or value is None else _swept(given, sweep.of, value)
                tell(f"simulating {title(job)}")
                plans += planned(traced, job, found.strategies)
            rankings.append(rank(plans, collectives=collectives, conditions=conditions))
        except ValueError as error:  # conditions name more nodes than there are
            raise FcdpError(str(error)) from None
    code = 0 if any(r.recommended for r in rankings) else 1
    if sweep is None:
        return _one(options.format, rankings[0], found.job), code
    points = [Point(text=t, ranking=r) for t, r in zip(sweep.texts, rankings, strict=True)]
    if options.plot is not None:
        draw(options.plot, sweep.of, sweep.values, points, title(found.job))
    return _swept_text(options.format, sweep.of, points, found.job), code


def _swept(job: Job, of: str, value: float) -> Job:
    """Return the job with another number of nodes, or another bandwidth of a node's card in bytes/s."""
    if of == "nodes":
        return replace(job, nodes=int(value))
    machine = job.profile.machine
    link = replace(machine.inter, bytes_per_s=value)
    return replace(job, profile=replace(job.profile, machine=replace(machine, inter=link)))


def _one(form: str, ranking: Ranking, job: Job) -> str:
    if form == "json":
        return json.dumps(ranking_record(ranking), indent=1)
    if form == "csv":
        return rows_csv([(None, row) for row in ranking.rows], "")
    return ranking_text(ranking, job)


def _swept_text(form: str, of: str, points: Sequence[Point], job: Job) -> str:
    if form == "json":
        found = [{of: p.text, **ranking_record(p.ranking)} for p in points]
        return json.dumps({"sweep": found}, indent=1)
    if form == "csv":
        return rows_csv([(p.text, row) for p in points for row in p.ranking.rows], of)
    return sweep_text(points, of, job)


def asked(options: argparse.Namespace) -> Asked:
    """Read the arguments, and trace the model unless a trace was saved.

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
    traced = [
        (traced_model(source, model_options, cp=job.cp, tp=job.tp, note=tell), job) for job in jobs
    ]
    return Asked(jobs=tuple(traced), strategies=options.strategy)


def tell(text: str) -> None:
    """Print the stage that begins and the process's running time, if stderr is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        since_s = time.monotonic() - _BEGAN_S
        print(f"fcdp: {since_s:5.1f} s  {text}", file=sys.stderr, flush=True)  # noqa: T201
