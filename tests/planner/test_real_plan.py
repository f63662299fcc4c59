"""The planner's plan for a cluster equals the plan that a run on such a cluster compiles."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from builders_planner import LENGTH, Losing, make_job, make_profile, traced
from fcdp_compile.cluster.profile import write_profile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.plan import Kind, Plan, Schedule, Tier
from fcdp_compile.strategy import Strategy
from fcdp_compile.tools.planner import Estimate, estimate
from tests.distributed.models import batch
from tests.distributed.ranks import run

pytestmark = [pytest.mark.distributed, pytest.mark.rare]

NODES = RANKS_PER_NODE = 2
BATCH = 2
ACCUMULATE = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A case to plan and to run; memory in bytes, of a device and of a node."""

    case: str
    strategy: str
    device: int = 10**9
    host: int = 10**9

    @property
    def name(self) -> str:
        return f"{self.case}-{self.strategy}-{self.device}-{self.host}"


TRIALS = [
    *(Trial(case="odd", strategy=s) for s in ("zero3", "zero++", "ddp", "fcdp+c8+g4")),
    *(Trial(case="odd-lora", strategy=s) for s in ("fcdp", "mics", "zero2")),
    *(Trial(case="broken", strategy=s) for s in ("fcdp", "zero1")),
    # Nothing stays on the device, and only some buckets and gradients find a place on the host.
    Trial(case="odd", strategy="fcdp", device=20_000, host=4000),
    Trial(case="odd-lora", strategy="fcdp", device=20_000, host=1500),
    Trial(case="broken", strategy="fcdp", device=20_000, host=3000),
]
"""Each strategy, model and amount of memory at least once."""


def _plans(mesh: DeviceMesh, trial: Trial, machine: str, host_memory: int) -> list[Plan]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fcdp_compile.shard(Losing(trial.case), mesh, strategy=trial.strategy)
    options = {"machine": machine, "device_memory": trial.device, "host_memory": host_memory}
    net: Any = torch.compile(model, backend="fcdp", options=options)
    for number in range(ACCUMULATE):
        ids = batch(model.case, step=number, rank=0, size=BATCH, length=LENGTH)
        with fcdp_compile.no_sync(model) if number < ACCUMULATE - 1 else nullcontext():
            net(ids).backward()
    return [plan for _, plan in sorted(state_of(model).plans.items())]


def _all_plans(
    mesh: DeviceMesh, trials: list[tuple[Trial, int]], machine: str
) -> dict[str, list[Plan]]:
    torch._dynamo.config.recompile_limit = 64
    return {trial.name: _plans(mesh, trial, machine, host) for trial, host in trials}


def _estimate(trial: Trial) -> Estimate:
    profile = make_profile(device_memory_bytes=trial.device, host_memory_bytes=trial.host)
    job = make_job(batch=BATCH, accumulate=ACCUMULATE, profile=profile)
    return estimate(traced(trial.case), Strategy.parse(trial.strategy), job)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Plan]]:
    """The plans of rank 0, by trial."""
    machine = tmp_path_factory.mktemp("profile") / "cluster.json"
    write_profile(machine, make_profile())
    trials = [
        (trial, RANKS_PER_NODE * _estimate(trial).job.host_bytes_per_rank) for trial in TRIALS
    ]
    found: dict[str, list[Plan]] = run(
        _all_plans, trials, str(machine), nodes=NODES, ranks_per_node=RANKS_PER_NODE
    )[0]
    return found


def _moves(schedule: Schedule, *, exactly: bool) -> list[tuple[Kind, int | None, int]]:
    steps = [s for s in schedule.steps if s.kind is not Kind.COMPUTE]
    return [(s.kind, s.bucket, s.bytes) if exactly else s.compared for s in steps]


def _places(plan: Plan, *, exactly: bool) -> list[tuple[object, ...]]:
    """Placements without their reason, which says whether the user or the machine limits host memory."""
    return [
        (p.bucket, *((p.tier, p.gradient_tier) if exactly else (p.is_cached, p.accumulates)))
        for p in plan.placements
    ]


@pytest.mark.parametrize("trial", TRIALS, ids=[t.name for t in TRIALS])
def test_they_are_the_same(trial: Trial, real: dict[str, list[Plan]]) -> None:
    """For a model with several graphs, plans must be equal only in the parts that ranks agree on.

    The planner subtracts the bytes that earlier graphs save for their backwards from the cache's room; a run
    knows these bytes only later.
    """
    compiled = real[trial.name]
    planned = [plan for plan in _estimate(trial).plans if plan.buckets]  # a loss has no buckets
    assert len(planned) == len(compiled)
    exactly = len(planned) == 1
    for mine, theirs in zip(planned, compiled, strict=True):
        assert mine.buckets == theirs.buckets
        assert [b.why for b in mine.buckets] == [b.why for b in theirs.buckets]
        assert _places(mine, exactly=exactly) == _places(theirs, exactly=exactly)
        assert mine.refresh == theirs.refresh
        assert [(s.direction, s.variant) for s in mine.schedules] == [
            (s.direction, s.variant) for s in theirs.schedules
        ]
        for my_part, their_part in zip(mine.schedules, theirs.schedules, strict=True):
            assert _moves(my_part, exactly=exactly) == _moves(their_part, exactly=exactly)
        assert (mine.peak_bytes == theirs.peak_bytes) or not exactly
        assert (mine.memory_limit_bytes == theirs.memory_limit_bytes) or not exactly
        assert mine.digest() == theirs.digest()


def test_the_trials_differ() -> None:
    """Control: several graphs, places of every kind, buckets and gradients without one."""
    plans = {trial: _estimate(trial).plans for trial in TRIALS}
    assert {len(p) > 1 for p in plans.values()} == {True, False}
    placements = [p for found in plans.values() for plan in found for p in plan.placements]
    assert {p.tier for p in placements} == set(Tier)
    assert {p.gradient_tier for p in placements} == {Tier.GPU, Tier.HOST, Tier.NONE}
    short = [
        {p.tier for plan in found for p in plan.placements}
        for trial, found in plans.items()
        if 1 < trial.host < 10**9
    ]
    assert {Tier.NONE, Tier.HOST} in short
