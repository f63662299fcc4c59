"""Several jobs in one group of ranks, each a test of its own, and the message of a job that must fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.ranks import run

Job = Callable[[DeviceMesh], Any]
"""A module-level function; its result is dropped."""

WORKS = "works"
Verdicts = list[dict[str, str]]
"""By rank and job: WORKS, or the error that the rank raised."""


def run_jobs(jobs: Mapping[str, Job], *, nodes: int, ranks_per_node: int) -> Verdicts:
    """Run jobs one after the other on the same ranks, as starting ranks takes longer than most jobs.

    A job that fails must fail on every rank alike: the others would wait for it.
    """
    return run(_verdicts, dict(jobs), nodes=nodes, ranks_per_node=ranks_per_node)


def _verdicts(mesh: DeviceMesh, jobs: Mapping[str, Job]) -> dict[str, str]:
    torch._dynamo.config.recompile_limit = 64
    verdicts = {}
    for name, job in jobs.items():
        try:
            job(mesh)
        except (
            Exception
        ) as error:  # whatever the error is, it is this job's verdict, and the next job runs
            verdicts[name] = f"{type(error).__name__}: {error}"
        else:
            verdicts[name] = WORKS
        dist.barrier()
    return verdicts


def message_of(error: type[Exception], function: Callable[[], Any]) -> str:
    """Call the function, which must raise this error; returns the error's message."""
    try:
        function()
    except error as raised:
        return str(raised)
    return "nothing was raised"
