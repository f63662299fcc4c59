"""Profiles, jobs and traces of small models for the planner; the only place to build one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor, nn

from fcdp_compile.cluster.profile import ClusterProfile
from fcdp_compile.plan.cost import Link, Machine
from fcdp_compile.tools.planner import Job, TracedModel, trace
from fcdp_compile.tools.planner.traced import Build, Inputs
from tests.distributed.models import CASES

LENGTH = 16
GB = 10**9

# With such short latencies, buckets of a few kilobytes are best, so that small models have several.
MACHINE = Machine(
    inter=Link(latency_s=1e-6, bytes_per_s=1e8),
    intra=Link(latency_s=1e-6, bytes_per_s=2e9),
    h2d=Link(latency_s=1e-6, bytes_per_s=1e9),
    d2h=Link(latency_s=1e-6, bytes_per_s=1e9),
    flops_per_s=1e11,
    memory_bytes_per_s=1e10,
)


def make_profile(
    *,
    device_memory_bytes: int = GB,
    host_memory_bytes: int = GB,
    ranks_per_node: int = 8,
    machine: Machine = MACHINE,
) -> ClusterProfile:
    """A cluster of CPUs with slow links."""
    return ClusterProfile(
        name="by hand",
        device_type="cpu",
        nodes=None,
        ranks_per_node=ranks_per_node,
        device_memory_bytes=device_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        ranks_per_host_link=1,
        intra_over_host_link=False,
        machine=machine,
        source="by hand",
    )


def make_job(
    *,
    nodes: int = 2,
    ranks_per_node: int = 2,
    batch: int = 2,
    accumulate: int = 1,
    profile: ClusterProfile | None = None,
) -> Job:
    """Two nodes of two, unless told otherwise."""
    return Job(
        profile=profile or make_profile(),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        batch=batch,
        accumulate=accumulate,
    )


def faster(profile: ClusterProfile, factor: float) -> ClusterProfile:
    """The cluster with `factor` times the bandwidth between nodes."""
    inter = profile.machine.inter
    link = replace(inter, bytes_per_s=factor * inter.bytes_per_s)
    return replace(profile, machine=replace(profile.machine, inter=link))


class Losing(nn.Module):
    """A model of `tests.distributed.models` that returns its loss, as the planner needs."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = CASES[case]
        self.model = self.case.model()

    def forward(self, ids: Tensor) -> Tensor:
        return self.case.loss(self.model, ids)


def build_case(case: str, batch: int, seq: int) -> tuple[nn.Module, Inputs]:
    """A model with its loss, and ids."""
    return Losing(case), {"ids": torch.zeros(batch, seq, dtype=torch.long)}


def build_of(case: str) -> Build:
    """The function that builds a model of `tests.distributed.models` for the planner."""
    return partial(build_case, case)


def build_with_batch(case: str, size: int) -> Build:
    """Like `build_of`, but the batch always has `size` samples, so no symbol can stand for it."""
    return lambda batch, seq: build_case(case, size, seq)


@cache
def traced(case: str) -> TracedModel:
    """The trace of a model of `tests.distributed.models`, made once in a process."""
    return trace(build_of(case), seq=LENGTH, param_dtype=None)
