"""The device memory that programs hold, in stream order, agrees with their plans, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fcdp_compile.plan import Direction, Kind, Plan
from fcdp_compile.plan.recording import ScheduleKey
from fcdp_compile.runtime.run import CompiledPlan
from tests.marks import quick
from tests.streams.programs import PROGRAMS, Job, four_ranks

ACTIVATION_BYTES = 4 * 32 * 4
WEIGHT_BYTES = 32 * 32 * 4


class Meter:
    """Takes the place of a recorder: measures the peak memory at each step of each run, by schedule."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.found: dict[ScheduleKey, tuple[Plan, list[int]]] = {}

    @contextmanager
    def run(self, plan: Plan, key: ScheduleKey, program: Any, lanes: Any) -> Iterator[Any]:
        alive: list[int] = []
        self.found[key] = plan, alive

        def around(index: int, call: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
            def metered(values: list[Any]) -> Any:
                before = self._job.device.check.alive_bytes()
                result = call(values)
                del values
                alive.append(max(before, self._job.device.check.alive_bytes()))
                return result

            return metered

        yield around


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with four_ranks():
        yield


@pytest.mark.parametrize(
    "name", quick(["full", "adapters on one node", "zero3", "mics"], "adapters on one node")
)
def test_what_is_alive_is_what_was_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[CompiledPlan] = []
    make = CompiledPlan.__init__

    def noted(self: CompiledPlan, *args: Any, **more: Any) -> None:
        make(self, *args, **more)
        bound.append(self)

    monkeypatch.setattr(CompiledPlan, "__init__", noted)
    job = Job(PROGRAMS[name])
    job.step()
    meter = Meter(job)
    for each in bound:
        each.recorder = meter  # type: ignore[assignment]
    job.step()
    job.step()
    assert {direction for direction, _ in meter.found} == {Direction.FORWARD, Direction.BACKWARD}
    for key, (plan, alive) in meter.found.items():
        (schedule,) = (s for s in plan.schedules if (s.direction, s.variant) == key)
        # The plan counts the whole step's memory, the meter only memory in use: they differ by a constant.
        # A segment frees its arguments one by one; the plan counts them as freed at the next step.
        differences = [
            planned - found
            for step, planned, found in zip(
                schedule.steps, schedule.memory_bytes, alive, strict=True
            )
            if step.kind is not Kind.COMPUTE
        ]
        within_a_segment = WEIGHT_BYTES if key[0] is Direction.FORWARD else 0
        spread = max(differences) - min(differences)
        # In torch 2.12 the first segment of the backward frees one activation more, also one by one.
        assert spread <= 2 * ACTIVATION_BYTES + within_a_segment, (key, differences)
