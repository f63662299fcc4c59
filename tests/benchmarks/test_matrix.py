from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks.reporting.rows import Cell
from benchmarks.running.job import BenchmarkJob
from benchmarks.running.matrix import MAX_STEPS, Durations, JobOrder, all_cells, plan
from benchmarks.systems.names import BY_NAME, SYSTEMS
from benchmarks.systems.shape import Shape

SHAPE = Shape()
COSTS = Durations(shape=SHAPE)


def planned(budget_s: float, **options: Any) -> JobOrder:
    return plan(all_cells(**options), shape=SHAPE, costs=COSTS, budget_s=budget_s)


def steps_of(schedule: JobOrder) -> dict[Cell, int]:
    steps: dict[Cell, int] = {}
    for job in schedule.jobs:
        for cell, timed in zip(job.cells(), job.timed, strict=True):
            steps[cell] = steps.get(cell, 0) + timed.steps
    return steps


def test_cells_leave_out_what_says_nothing() -> None:
    cells = all_cells()
    assert len(cells) == len(set(cells))
    only = [s.name for s in SYSTEMS if s.accumulating_only]
    assert only, "the control: there is such a system"
    assert {c.accumulation for c in cells if c.system in only} == {8}
    assert {c.accumulation for c in cells if c.system not in only} == {1, 8}


def test_chosen_cells_only() -> None:
    cells = all_cells(
        systems=["fcdp", "ddp"], modes=["lora"], accumulations=[1], networks=["1gbit"]
    )
    assert cells == [Cell("ddp", "lora", 1, "1gbit"), Cell("fcdp", "lora", 1, "1gbit")]


@pytest.mark.parametrize("minutes", [20, 40, 60, 90, 200])
def test_a_plan_fits_and_has_every_cell_once_or_left_out(minutes: float) -> None:
    schedule = planned(60 * minutes)
    assert schedule.expected_s <= 60 * minutes
    assert schedule.expected_s == pytest.approx(sum(COSTS.job_s(job) for job in schedule.jobs))
    steps = steps_of(schedule)
    left_out = [skipped.cell for skipped in schedule.skipped]
    assert sorted([*steps, *left_out]) == sorted(all_cells())
    assert all(1 <= n <= MAX_STEPS for n in steps.values())


def test_more_time_leaves_out_less_and_repeats_more() -> None:
    schedules = [planned(60 * minutes) for minutes in (20, 40, 60, 120, 240)]
    for shorter, longer in itertools.pairwise(schedules):
        assert len(longer.skipped) <= len(shorter.skipped)
    assert schedules[0].skipped
    assert not schedules[-1].skipped
    assert sum(steps_of(schedules[-1]).values()) > sum(steps_of(schedules[0]).values())


def test_the_dearest_twin_is_left_out_first() -> None:
    first = planned(60 * 60).skipped[0].cell
    assert BY_NAME[first.system].is_twin
    assert (first.accumulation, first.network) == (8, "100mbit")


def test_a_step_of_minutes_is_taken_once_and_a_short_one_often() -> None:
    steps = steps_of(planned(240 * 60))
    assert steps[Cell("fsdp2", "full", 8, "100mbit")] == 1
    assert steps[Cell("fcdp", "lora", 1, "100mbit")] == MAX_STEPS


def test_systems_take_turns_in_each_round() -> None:
    jobs = planned(240 * 60).jobs
    assert [job.round for job in jobs] == sorted(job.round for job in jobs)
    for number in (0, 1):
        order = [(job.mode, job.system) for job in jobs if job.round == number]
        assert len(order) == len(set(order)), "each system and mode once a round"
        assert len(order) > 10


def test_every_launch_begins_with_the_same_check_steps() -> None:
    for job in planned(40 * 60).jobs:
        accumulations = {1, *(t.accumulation for t in job.timed)}
        assert job.check_steps == {k: 3 if k == 1 else 1 for k in accumulations}


@pytest.mark.parametrize(
    ("cell", "multiple_of_w"),
    [
        (Cell("ddp", "full", 8, "100mbit"), 1.5),
        (Cell("fcdp", "full", 1, "100mbit"), 1.0),
        (Cell("fcdp", "full", 8, "100mbit"), 1.0),
        (Cell("fsdp2", "full", 1, "100mbit"), 3.0),
        (Cell("fsdp2-node", "full", 1, "100mbit"), 2.25),
        (Cell("hsdp", "full", 8, "100mbit"), 1.0),
    ],
)
def test_step_cost_is_compute_and_network(cell: Cell, multiple_of_w: float) -> None:
    network_s = 8 * multiple_of_w * SHAPE.approximate_bytes / 1e8
    compute_s = cell.accumulation * COSTS.micro_batch_s
    assert COSTS.step_s(cell) == pytest.approx(network_s + compute_s, abs=0.1)
    uncapped = cell._replace(network="unlimited")
    assert COSTS.step_s(uncapped) == pytest.approx(compute_s, abs=0.1)


def test_nothing_to_measure_is_refused() -> None:
    for cells, rounds, budget_s in (
        ([], 1, 60.0),
        (all_cells(), 0, 60.0),
        (all_cells(), 1, 0.0),
    ):
        with pytest.raises(ValueError, match="nothing to measure"):
            plan(cells, shape=SHAPE, costs=COSTS, budget_s=budget_s, rounds=rounds)


def test_one_cell_is_measured_whatever_it_takes() -> None:
    schedule = planned(
        1.0, systems=["fsdp2"], modes=["full"], accumulations=[8], networks=["100mbit"]
    )
    assert steps_of(schedule) == {Cell("fsdp2", "full", 8, "100mbit"): 1}


def test_a_job_survives_its_file() -> None:
    job = planned(40 * 60).jobs[0]
    assert BenchmarkJob.from_json(job.to_json()) == job
