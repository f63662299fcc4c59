"""Several jobs in one group of ranks, each a test of its own, and the message of a job that must fail."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.ranks import run

Job = Callable[[DeviceMesh], Any]
"""A module-level function; its result is dropped."""

WORKS = "works"
Verdicts = list[dict[str, str]]
"""By rank and job: WORKS, or the error that the rank raised."""


def rows(
    jobs: Mapping[str, Job], *, slow: Collection[str] = (), cpu: Collection[str] = ()
) -> list[Any]:
    """The jobs' names, for `pytest.mark.parametrize`.

    slow: those that only `make test-all` runs.  cpu: those that are left out on the simulated device.
    """
    assert {*slow, *cpu} <= jobs.keys(), (slow, cpu)
    marks = ((pytest.mark.slow, slow), (pytest.mark.cpu, cpu))
    return [pytest.param(name, marks=[m for m, of in marks if name in of]) for name in jobs]


def asked(request: pytest.FixtureRequest, jobs: Mapping[str, Job]) -> dict[str, Job]:
    """The jobs whose tests this session runs, for a fixture that runs them all at once."""
    names = {
        value
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
        if hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if isinstance(value, str)
    }
    return {name: job for name, job in jobs.items() if name in names}


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
