"""`fcdp clean`: what jobs have left in this machine's memory, and its removal."""

from __future__ import annotations

import argparse
import os

from fcdp_compile.cli.command import Answer
from fcdp_compile.cluster.node_memory import (
    LeftMemory,
    job_name,
    memories,
    memory_root,
    remove_memory,
)
from fcdp_compile.errors import ArgumentError, did_you_mean
from fcdp_compile.tools.view.table import table

SUMMARY = "remove what jobs that were killed have left in memory"
DESCRIPTION = (
    "List the memory in which jobs with fcdp_compile.survive keep their state on this machine, or remove "
    "that of jobs which will not be started again. A job that ends normally leaves none. Memory that a "
    "running process of this user uses is never removed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `fcdp clean`."""
    jobs = "remove the memory of these jobs (default: only list what there is)"
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=jobs)
    parser.add_argument("--all", action="store_true", help="remove the memory of all jobs")


def run(options: argparse.Namespace) -> Answer:
    """List or remove; exit code 1 if the memory of a job that is to be removed is in use.

    Raises: ArgumentError for a job that has no memory here.
    """
    found = {memory.job: memory for memory in memories(memory_root(os.environ))}
    if options.all and options.jobs:
        raise ArgumentError("give names of jobs or --all, not both")
    jobs = [job if job in found else job_name(job) for job in options.jobs]
    for job, name in zip(options.jobs, jobs, strict=True):
        if name not in found:
            hint = did_you_mean(job, found)
            raise ArgumentError(f"job {job!r} has no memory on this machine{hint}")
    chosen = list(found) if options.all else list(dict.fromkeys(jobs))
    if not chosen:
        return Answer(_listed(list(found.values())))
    used = [job for job in chosen if not remove_memory(found[job])]
    lines = [f"removed {job}, {_size(found[job])}" for job in chosen if job not in used]
    lines += [f"{job} is running, and keeps its {_size(found[job])}" for job in used]
    return Answer("\n".join(lines), code=1 if used else 0)


def _listed(found: list[LeftMemory]) -> str:
    if not found:
        return "No job has left memory on this machine."
    rows = [(m.job, _size(m), _age(m.age_s), "runs" if m.is_used else "") for m in found]
    return table(("job", "memory", "last written", ""), rows, ("left", "right", "right", "left"))


def _size(memory: LeftMemory) -> str:
    return f"{memory.size_bytes / 2**20:,.1f} MiB"


def _age(seconds: float) -> str:
    minutes = int(seconds) // 60
    return f"{int(seconds)} s ago" if minutes < 1 else f"{minutes // 60} h {minutes % 60} min ago"
