"""Record the times of the first runs of each program of a plan, after one run to warm up.

A compute step is timed around its call; a step on a lane, from the start of its task on the lane to the
task's end.  Nothing waits for a time: on a GPU, times are events on streams, and are read after the run, when
all events are past.

[Note: steps without a task] A step may have nothing to do: a node shard that stays on the device is neither
stored nor loaded, and a group of one rank gathers nothing.  Its `Pending` then belongs to the task of an
earlier step.  Such a step is a point in time: when it was called, or when the steps that it waits for were
done, whichever is later.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from fcdp_compile.plan import Kind, Lane, Plan, Step
from fcdp_compile.plan.recording import RecordedRun, Recording, ScheduleKey
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.marks import Clock, Mark
from fcdp_compile.runtime.lanes.tasks import Begun, Run
from fcdp_compile.runtime.program import Around, Call, Program

_WARM_UP = 1
"""How many first runs of a program are not recorded: they load kernels and fill caches and pools."""

_DECIMALS = 9

Write = Callable[[Plan, Sequence[Recording]], None]


class Recorder:
    """Records the first runs of each program of one plan; lives with its `CompiledPlan`.

    The very first run of a program is the warm-up and is not recorded.

    runs: how many runs of each program are recorded.  write: called with the recordings, but never during a
    recorded run.  The last call is when the recorder is deleted or the interpreter ends.
    """

    def __init__(self, runs: int, clock: Clock, write: Write) -> None:
        self._clock = clock
        self._kept = _Kept(_WARM_UP + runs, write)
        weakref.finalize(self, self._kept.write_rest)

    @contextmanager
    def run(
        self, plan: Plan, key: ScheduleKey, program: Program, lanes: Lanes
    ) -> Iterator[Around | None]:
        """Surround a run of a program; gives the wrapper of its steps if the run is to be recorded.

        A run that fails does not count.
        """
        kept = self._kept
        kept.belongs_to(plan)
        seen = kept.seen.get(key, 0)
        if seen >= kept.enough:
            kept.write_finished()
            yield None
            return
        if seen < _WARM_UP:
            yield None
        else:
            schedule = next(s for s in plan.schedules if (s.direction, s.variant) == key)
            assert program.kinds == [s.kind for s in schedule.steps], f"{key}: {program.kinds}"
            timing = _Timing(schedule.steps, self._clock)
            yield partial(timing.around, lanes)
            kept.timings.setdefault(key, []).append(timing)
        kept.seen[key] = seen + 1
        if all(count >= kept.enough for count in kept.seen.values()):
            kept.write_finished()


class _Timing:
    """The marks of one run."""

    def __init__(self, steps: Sequence[Step], clock: Clock) -> None:
        self._steps = steps
        self._clock = clock
        self._starts: list[Mark | None] = [None] * len(steps)
        self._ends: list[Mark | None] = [None] * len(steps)
        self._has_task = [False] * len(steps)
        self._origin = clock()

    def around(self, lanes: Lanes, index: int, call: Call) -> Call:
        """Wrap a step's call so that it is timed."""
        if self._steps[index].lane is Lane.COMPUTE:
            return partial(self._compute, index, call)
        return partial(self._issue, lanes, index, call)

    def is_complete(self) -> bool:
        """Whether all steps have ended."""
        return all(end is not None and end.is_past() for end in self._ends)

    def resolve(self) -> RecordedRun:
        """The times of a complete run."""
        starts_s: list[float] = []
        ends_s: list[float] = []
        for step, start, end in zip(self._steps, self._starts, self._ends, strict=True):
            start_s, end_s = self._since_origin(start), self._since_origin(end)
            if step.lane is not Lane.COMPUTE and not self._has_task[step.index]:
                # [Note: steps without a task]
                start_s = max([start_s, *(ends_s[i] for i in step.waits)])
            starts_s.append(start_s)
            # CUDA rounds: a step of no length may seem to end before it starts.
            ends_s.append(max(start_s, end_s))
        return RecordedRun(starts_s=tuple(starts_s), ends_s=tuple(ends_s))

    def _since_origin(self, mark: Mark | None) -> float:
        assert mark is not None, "a run is resolved when it is complete"
        return max(0.0, round(mark.after_s(self._origin), _DECIMALS))

    def _compute(self, index: int, call: Call, values: list[Any]) -> Any:
        self._starts[index] = mark = self._clock()
        result = call(values)
        is_point = self._steps[index].kind is Kind.FREE
        self._ends[index] = mark if is_point else self._clock()
        return result

    def _issue(self, lanes: Lanes, index: int, call: Call, values: list[Any]) -> Any:
        with lanes.timing(partial(self._timed, index)):
            result = call(values)
        if not self._has_task[index]:
            self._starts[index] = self._ends[index] = self._clock()
        return result

    def _timed(self, index: int, lane: Lane, run: Run) -> Run:
        if lane is not self._steps[index].lane:  # a load may move its bucket to the host
            return run
        self._has_task[index] = True

        def timed() -> object:
            self._starts[index] = self._clock()
            left = run()
            if isinstance(left, Begun):
                return Begun(partial(self._finish, index, left))
            self._ends[index] = self._clock()
            return left

        return timed

    def _finish(self, index: int, begun: Begun) -> None:
        begun.finish()
        self._ends[index] = self._clock()


class _Kept:
    """The recordings of one plan; not in the recorder, so that they outlive it.

    enough: after this many runs of a program, its runs are no longer recorded.  seen: the number of runs of
    each program, at most `enough`.  timings: the timings of runs that were not complete at the last look.
    """

    def __init__(self, enough: int, write: Write) -> None:
        self.enough = enough
        self.seen: dict[ScheduleKey, int] = {}
        self.timings: dict[ScheduleKey, list[_Timing]] = {}
        self._plan: Plan | None = None
        self._runs: dict[ScheduleKey, list[RecordedRun]] = {}
        self._written: dict[ScheduleKey, int] = {}
        self._write = write
        self._pid = os.getpid()

    def belongs_to(self, plan: Plan) -> None:
        """Note the plan, which may have more schedules now; rewrite the earlier recordings as this plan's."""
        if plan is self._plan:
            return
        self._plan = plan
        if written := list(self._written):
            self._written.clear()
            self._write_those(written)

    def write_finished(self) -> None:
        """Write the recordings of programs whose runs are all complete, if there are new ones."""
        if self.timings:
            self._settle()
            wanted = self.enough - _WARM_UP
            self._write_those([key for key, runs in self._runs.items() if len(runs) == wanted])

    def write_rest(self) -> None:
        """Write all complete runs: no others will come."""
        if os.getpid() == self._pid:  # a forked child has a copy of this
            self._settle()
            self._write_those(list(self._runs))

    def _settle(self) -> None:
        for key, timings in list(self.timings.items()):
            while timings and timings[0].is_complete():
                self._runs.setdefault(key, []).append(timings.pop(0).resolve())
            if not timings:
                del self.timings[key]

    def _write_those(self, keys: Sequence[ScheduleKey]) -> None:
        counts = {key: len(self._runs[key]) for key in keys}
        if self._plan is None or counts.items() <= self._written.items():
            return
        self._written |= counts
        digest, graph = self._plan.digest(), self._plan.graph
        recordings = [
            Recording(
                plan=digest,
                graph=graph,
                direction=direction,
                variant=variant,
                runs=tuple(self._runs[direction, variant]),
            )
            for direction, variant in keys
        ]
        self._write(self._plan, recordings)
