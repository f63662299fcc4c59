"""What tests of the recorder share: a clock, the written times, a program of steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

from builders_plan import make_plan
from fcdp_compile.plan import Direction, Plan, Schedule, Step, Variant
from fcdp_compile.plan.recording import Recording, ScheduleKey
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.marks import Mark
from fcdp_compile.runtime.recorder import Recorder

FORWARD = (Direction.FORWARD, Variant.COLD)


class Clock:
    """A clock that ticks at every look; its marks are over once it says so."""

    def __init__(self) -> None:
        self._ticks = count()
        self.is_past = True

    def __call__(self) -> Mark:
        tick = next(self._ticks)
        return SimpleNamespace(
            tick=tick, is_past=lambda: self.is_past, after_s=lambda origin: tick - origin.tick
        )


class Written:
    """Takes what a recorder writes, in place of a file."""

    def __init__(self) -> None:
        self.times: list[tuple[Plan, dict[ScheduleKey, Recording]]] = []

    def __call__(self, plan: Plan, recordings: Sequence[Recording]) -> None:
        self.times.append((plan, {r.key: r for r in recordings}))

    @property
    def counts(self) -> list[dict[ScheduleKey, int]]:
        """The number of runs of each schedule, for each write."""
        return [{key: len(r.runs) for key, r in found.items()} for _, found in self.times]


Calls = Sequence[tuple[Step, Callable[[], object]]]


class Steps:
    """A program whose steps a test defines; runs as a `Program` does."""

    def __init__(self, lanes: Lanes, calls: Calls) -> None:
        self._lanes = lanes
        self._calls = [call for _, call in calls]
        self.steps = tuple(step for step, _ in calls)
        self.kinds = [step.kind for step in self.steps]
        schedule = Schedule(direction=FORWARD[0], variant=FORWARD[1], steps=self.steps)
        self._plan = replace(make_plan(), schedules=(schedule,))

    def run(self, recorder: Recorder) -> None:
        program: Any = self
        with recorder.run(self._plan, FORWARD, program, self._lanes) as around:
            for i, call in enumerate(self._calls):
                plain = partial(_call, call)
                (plain if around is None else around(i, plain))([])


def _call(call: Callable[[], object], values: list[Any]) -> object:
    return call()
