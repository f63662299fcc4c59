"""The recommended strategy wins, whichever strategy that is, and one sentence says why."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from builders_planner import MACHINE, faster, make_job, make_profile
from fcdp_compile.cluster.profile import ClusterProfile
from fcdp_compile.plan.cost import Link
from fcdp_compile.strategy import Strategy
from fcdp_compile.tools.planner import (
    Job,
    Ranking,
    TracedModel,
    estimates,
    planned,
    rank,
    sensible,
    trace,
)
from fcdp_compile.tools.planner.traced import Inputs

WIDTH, LAYERS = 512, 6
MODEL_BYTES = 4 * LAYERS * WIDTH * WIDTH
ALL = ("ddp", "mics", "zero3", "zero++", "fcdp")


class Stack(nn.Module):
    """Square matrices; all of them or only the last are trained."""

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.adapter = nn.Parameter(torch.ones(WIDTH))
        self.layers.requires_grad_(not is_frozen)

    def forward(self, values: Tensor) -> Tensor:
        values = values * self.adapter
        for layer in self.layers:
            values = layer(values).relu()
        return values.sum()


@cache
def stack(is_frozen: bool) -> TracedModel:
    def build(batch: int, seq: int) -> tuple[nn.Module, Inputs]:
        return Stack(is_frozen=is_frozen), (torch.zeros(batch, WIDTH),)

    return trace(build, seq=1, param_dtype=None)


def _profile(*, latency_s: float = 1e-6, bytes_per_s: float = 1e8, **more: int) -> ClusterProfile:
    inter = Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return make_profile(machine=replace(MACHINE, inter=inter), **more)


def _rank(job: Job, *, is_frozen: bool, names: tuple[str, ...] = ALL) -> Ranking:
    strategies = [Strategy.parse(name) for name in names]
    return rank(estimates(stack(is_frozen), strategies, job))


# Who wins.


def test_ddp_wins_where_memory_is_no_matter_and_messages_are() -> None:
    profile = _profile(latency_s=0.05, bytes_per_s=1e11)
    intra = replace(profile.machine.intra, latency_s=0.01)
    profile = replace(profile, machine=replace(profile.machine, intra=intra))
    found = _rank(make_job(profile=profile), is_frozen=False)
    assert found.recommended == "ddp"
    assert found.why.startswith("ddp is the fastest that fits, ")


def test_mics_wins_where_whole_copies_fit_a_node_but_no_device() -> None:
    # Parameters, gradients and moments take 16 bytes a parameter: on each device with ddp, 1/8 with mics.
    profile = _profile(latency_s=0.05, bytes_per_s=1e11, device_memory_bytes=4 * MODEL_BYTES)
    found = _rank(make_job(ranks_per_node=8, profile=profile), is_frozen=False)
    assert found.recommended == "mics"
    best, next_best = found.rows[:2]
    assert best.inter_bytes_per_step == next_best.inter_bytes_per_step, "control"
    assert "a node sends 0.00629 GB a step as well, but compute waits" in found.why
    assert not next(r for r in found.rows if r.strategy == "ddp").fits


def test_zero_plus_plus_wins_where_hosts_have_no_room() -> None:
    profile = _profile(host_memory_bytes=1000)
    found = _rank(make_job(profile=profile), is_frozen=False, names=("zero3", "zero++", "fcdp"))
    assert found.recommended == "zero++"
    assert "a node sends" in found.why


def test_fcdp_wins_where_devices_are_short_and_the_network_is_slow() -> None:
    profile = _profile(bytes_per_s=1e7, device_memory_bytes=MODEL_BYTES)
    found = _rank(make_job(profile=profile), is_frozen=True)
    assert found.recommended == "fcdp"
    assert "ddp" not in [r.strategy for r in found.rows if r.fits]


def test_on_one_node_frozen_shards_wait_on_the_host_only_where_nothing_else_fits() -> None:
    def found(device_bytes: int) -> Ranking:
        job = make_job(nodes=1, profile=_profile(device_memory_bytes=device_bytes))
        return _rank(job, is_frozen=True, names=("zero1", "zero3", "fcdp"))

    short, roomy = found(MODEL_BYTES * 9 // 10), found(100 * MODEL_BYTES)
    assert short.recommended == "fcdp"
    assert [r.strategy for r in short.rows if r.fits] == ["fcdp"]
    assert [r.host_bytes_per_node for r in (short.rows[0], roomy.rows[0])] == [MODEL_BYTES, 0]
    assert short.rows[0].step_s > roomy.rows[0].step_s, "loading takes time"


def test_a_gpu_with_the_memory_of_the_host_keeps_all_and_counts_it_once() -> None:
    profile = _profile(device_memory_bytes=MODEL_BYTES)
    rows = {}
    for shares in (False, True):
        job = make_job(profile=replace(profile, shares_memory=shares))
        (rows[shares],) = _rank(job, is_frozen=True, names=("fcdp",)).rows
    assert rows[False].host_bytes_per_node > 0
    assert rows[True].host_bytes_per_node == 0
    assert rows[True].peak_gpu_bytes > rows[False].peak_gpu_bytes


def test_among_equals_the_one_that_takes_least() -> None:
    job = make_job(profile=_profile(bytes_per_s=1e12))
    compute_bound = replace(job.profile, machine=replace(job.profile.machine, flops_per_s=1e6))
    found = _rank(replace(job, profile=compute_bound), is_frozen=False)
    slowest = max(r.step_s for r in found.rows)
    assert slowest < 1.02 * found.rows[0].step_s, "control: they are equally fast"
    best = next(r for r in found.rows if r.strategy == found.recommended)
    assert best.peak_gpu_bytes == min(r.peak_gpu_bytes for r in found.rows)
    assert best is found.rows[0] or "is as fast as" in found.why


# Order, and what is said.


def test_those_that_fit_come_first_and_the_fastest_of_them() -> None:
    profile = _profile(device_memory_bytes=3 * MODEL_BYTES)
    found = _rank(make_job(profile=profile), is_frozen=False)
    assert len({r.fits for r in found.rows}) == 2, "control"
    assert list(found.rows) == sorted(found.rows, key=lambda r: (not r.fits, r.step_s))
    assert found.why.endswith(".")
    assert "\n" not in found.why


def test_nothing_fits() -> None:
    profile = _profile(device_memory_bytes=2000)
    found = _rank(make_job(profile=profile), is_frozen=False)
    assert found.recommended is None
    assert not any(r.fits for r in found.rows)
    assert "nothing fits" in found.why
    assert "use more nodes, larger GPUs or --lora" in found.why


def test_a_smaller_batch_would_fit() -> None:
    profile = _profile(device_memory_bytes=4 * MODEL_BYTES)
    found = _rank(make_job(batch=2000, profile=profile), is_frozen=False)
    assert found.recommended is None
    largest = max(r.max_batch_per_gpu or 0 for r in found.rows)
    assert 0 < largest < 2000
    assert f"a batch of {largest} a GPU would" in found.why
    smaller = _rank(make_job(batch=largest, profile=profile), is_frozen=False)
    assert smaller.recommended is not None


@pytest.mark.parametrize(
    ("gpu_bytes", "offloads"), [(4 * MODEL_BYTES, False), (2 * MODEL_BYTES, True)]
)
def test_home_shards_go_to_the_host_only_where_nothing_else_fits(
    gpu_bytes: int, offloads: bool
) -> None:
    job = make_job(profile=_profile(device_memory_bytes=gpu_bytes))
    found = rank(planned(stack(is_frozen=False), job))
    others = [r for r in found.rows if not r.offloads]
    assert (len(others) < len(found.rows)) is offloads, "planned only then"
    assert any(r.fits for r in others) is not offloads, "control"
    assert found.rows[0].fits
    assert found.rows[0].offloads is offloads
    assert found.recommended is not None
    assert found.recommended.endswith("+offload") is offloads


def test_the_only_one_that_fits() -> None:
    found = _rank(make_job(), is_frozen=False, names=("zero3",))
    assert found.why.startswith("zero3 fits")


def test_sensible_strategies_differ() -> None:
    """All of them differ, and none needs more nodes than there are."""
    trained, lora = stack(is_frozen=False), stack(is_frozen=True)
    several = [x.name for x in sensible(trained, make_job(accumulate=4))]
    assert {"ddp", "zero1", "zero2", "zero3", "zero++", "mics", "fcdp"} <= set(several)
    assert "zero2" not in [x.name for x in sensible(trained, make_job())], (
        "zero1 without micro-batches"
    )
    assert "fcdp" in [x.name for x in sensible(lora, make_job(nodes=1))]
    one_node = [x.name for x in sensible(trained, make_job(nodes=1))]
    assert {"mics", "zero++", "fcdp"}.isdisjoint(one_node), "only frozen shards wait on the host"
    rows = _rank(make_job(nodes=1), is_frozen=False, names=tuple(one_node)).rows
    assert all(r.inter_bytes_per_step == 0 for r in rows)


def test_the_record_is_what_rows_say() -> None:
    found = _rank(make_job(), is_frozen=True)
    record = asdict(found)
    assert [r["strategy"] for r in record["rows"]] == [r.strategy for r in found.rows]
    assert (record["recommended"], record["why"]) == (found.recommended, found.why)
    for row in record["rows"]:
        assert row["samples_per_s"] == pytest.approx(make_job().samples / row["step_s"])


# Monotone.


@pytest.mark.parametrize("name", [*ALL, "zero1", "fcdp+ho_ring"])
def test_more_bandwidth_never_makes_a_plan_slower(name: str) -> None:
    job = make_job(accumulate=2)
    (found,) = estimates(stack(False), [Strategy.parse(name)], job)
    times = [
        found.simulate(job=replace(job, profile=faster(job.profile, factor))).step_s
        for factor in (0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 1000.0)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1], "control: bandwidth matters"
