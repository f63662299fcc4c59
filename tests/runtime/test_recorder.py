"""Times of steps: which runs are recorded, when steps start and end, and when the file is written."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from builders_graph import Lowered, Where, lower_toy
from builders_plan import make_plan, make_steps
from fcdp_compile.devices import Cpu, Cuda
from fcdp_compile.passes.describe import describe
from fcdp_compile.plan import LANES, Direction, Kind, Lane, Plan, Schedule, Step, Tier, Variant
from fcdp_compile.plan.recording import Recording, ScheduleKey
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.pending import Pending
from fcdp_compile.runtime.lanes.tasks import Begun
from fcdp_compile.runtime.recorder import Mark, Recorder, clock_of
from tests.recorded import assert_causal, assert_in_turn
from tests.runtime.fake_model import fake_model, program, same_on_all_ranks
from tests.runtime.on_lanes import Gate
from tests.runtime.simulated_device import Buffer, SimulatedDevice

EVEN = {"w": (8, 4), "b": (4,)}
X, T = torch.tensor(3.0), torch.tensor(2.0)
FORWARD = (Direction.FORWARD, Variant.COLD)
BACKWARD = (Direction.BACKWARD, Variant.COLD)
CUDA = torch.device("cuda", 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


class Toy:
    """The toy model and its programs, recorded."""

    def __init__(self, runs: int, *, strategy: str = "fcdp", tier: Tier | None = None) -> None:
        self.made = lower_toy(EVEN, Where(), strategy=strategy, scheduled=True, segmented=True)
        self.plan = plan_of(self.made)
        self.programs = {key: program(self.made, *key) for key in self.made.graphs}
        self.model = fake_model(strategy, tier)
        self.clock, self.written = Clock(), Written()
        self.recorder = Recorder(runs, self.clock, self.written)
        self.homes = same_on_all_ranks()[1]

    def run(self, key: ScheduleKey, args: list[Any]) -> tuple[Any, ...]:
        running = self.programs[key]
        with self.recorder.run(self.plan, key, running, self.model.lanes) as around:
            return running.run(self.model, args, around=around)

    def step(self) -> tuple[Any, ...]:
        """A forward and its backward; returns all results."""
        y, *saved = self.run(FORWARD, [*self.homes, X])
        return (y, *self.run(BACKWARD, [*saved, T]))

    def schedule(self, key: ScheduleKey) -> Schedule:
        return next(s for s in self.plan.schedules if (s.direction, s.variant) == key)


def plan_of(made: Lowered) -> Plan:
    schedules = tuple(describe(gm, made.contexts[key]) for key, gm in made.graphs.items())
    placements = tuple(made.placements[i] for i in made.buckets)
    buckets = tuple(made.buckets.values())
    return replace(make_plan(), buckets=buckets, placements=placements, schedules=schedules)


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
def test_recorded_runs_follow_the_schedule_and_compute_the_same(strategy: str) -> None:
    toy, plain = Toy(2, strategy=strategy), Toy(0, strategy=strategy)
    for _ in range(4):
        for mine, other in zip(toy.step(), plain.step(), strict=True):
            assert torch.equal(mine, other)
    assert toy.model.counters.calls == plain.model.counters.calls
    (found,) = (found for _, found in toy.written.times)
    assert toy.written.counts == [{FORWARD: 2, BACKWARD: 2}]
    assert not plain.written.times
    for key, recording in found.items():
        assert (recording.plan, recording.graph) == (toy.plan.digest(), toy.plan.graph)
        for run in recording.runs:
            assert_causal(run, toy.schedule(key).steps)
            assert_in_turn(run, toy.schedule(key).steps)


def test_only_some_runs_after_the_first_are_recorded() -> None:
    toy = Toy(3)
    running = toy.programs[FORWARD]
    recorded = []
    for _ in range(6):
        with toy.recorder.run(toy.plan, FORWARD, running, toy.model.lanes) as around:
            recorded.append(around is not None)
            running.run(toy.model, [*toy.homes, X], around=around)
    assert recorded == [False, True, True, True, False, False]


def test_a_run_that_fails_does_not_count() -> None:
    toy = Toy(1)
    toy.step()
    toy.model.collectives.fails = {Kind.INTRA_ALL_GATHER}
    for _ in range(3):
        with pytest.raises(RuntimeError, match="failed"):
            toy.run(FORWARD, [*toy.homes, X])
    toy.model.collectives.fails = set()
    assert not toy.written.times
    toy.step()
    assert toy.written.counts == [{FORWARD: 1, BACKWARD: 1}]


def test_what_needs_no_time_is_a_point() -> None:
    toy = Toy(1)
    toy.step(), toy.step()
    ((_, found),) = toy.written.times
    lengths = {}
    for key, recording in found.items():
        (run,) = recording.runs
        for step, start_s, end_s in zip(
            toy.schedule(key).steps, run.starts_s, run.ends_s, strict=True
        ):
            lengths.setdefault(step.kind, []).append(end_s - start_s)
    assert set(lengths.pop(Kind.FREE)) == {0}
    assert all(length > 0 for of_kind in lengths.values() for length in of_kind)


def test_a_step_without_a_task_is_over_when_what_it_waits_for_is() -> None:
    """A node shard that stays on the device is stored as soon as it is gathered: nothing is copied."""
    toy = Toy(1, tier=Tier.GPU)
    gate = Gate()
    toy.step()
    real = toy.model.collectives.all_gather

    def slow(kind: Kind, *args: Any, **more: Any) -> Pending:
        if kind is Kind.INTER_ALL_GATHER:
            toy.model.lanes.start(Lane.INTER, gate, out=torch.zeros(1), reads=[], name="before")
        elif kind is Kind.INTRA_ALL_GATHER:
            gate.open()  # the step after the store has been called
        return real(kind, *args, **more)

    toy.model.collectives.all_gather = slow
    toy.step()
    ((_, found),) = toy.written.times
    (run,) = found[FORWARD].runs
    steps = toy.schedule(FORWARD).steps
    assert_causal(run, steps)
    (store,) = (s for s in steps if s.kind is Kind.STORE)
    (gather,) = (s for s in steps if s.kind is Kind.INTER_ALL_GATHER)
    assert run.starts_s[store.index] == run.ends_s[store.index] == run.ends_s[gather.index]


# When it is written.


def test_nothing_is_written_while_another_program_has_runs_to_record() -> None:
    toy = Toy(2)
    toy.step()
    for _ in range(3):
        toy.run(FORWARD, [*toy.homes, X])
        seen = len(toy.written.times)
    # The forward's runs are complete with the third, the backward's are not: no write before a run that is
    # not recorded.
    assert seen == 1
    assert toy.written.counts == [{FORWARD: 2}]
    _, *saved = toy.run(FORWARD, [*toy.homes, X])
    toy.run(BACKWARD, [*saved, T])
    assert len(toy.written.times) == 1
    _, *saved = toy.run(FORWARD, [*toy.homes, X])
    toy.run(BACKWARD, [*saved, T])
    assert toy.written.counts == [{FORWARD: 2}, {FORWARD: 2, BACKWARD: 2}]
    toy.step()
    assert len(toy.written.times) == 2


def test_what_is_not_past_is_looked_up_later() -> None:
    toy = Toy(1)
    toy.clock.is_past = False
    for _ in range(4):
        toy.step()
    assert not toy.written.times
    toy.clock.is_past = True
    toy.step()
    assert toy.written.counts == [{FORWARD: 1, BACKWARD: 1}]


def test_the_rest_is_written_at_the_end() -> None:
    toy = Toy(5)
    for _ in range(3):
        toy.step()
    toy.run(FORWARD, [*toy.homes, X])
    assert not toy.written.times
    del toy.recorder
    assert toy.written.counts == [{FORWARD: 3, BACKWARD: 2}]


def test_at_the_end_nothing_is_written_twice() -> None:
    toy = Toy(1)
    toy.step(), toy.step()
    assert len(toy.written.times) == 1
    del toy.recorder
    assert len(toy.written.times) == 1


def test_a_forked_child_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(5)
    toy.step(), toy.step()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del toy.recorder
    assert not toy.written.times


def test_a_plan_that_gets_more_schedules_keeps_what_was_recorded() -> None:
    """Its digest changes, and its file too: `no_sync` was used."""
    toy = Toy(1)
    whole = toy.plan
    later = (Direction.BACKWARD, Variant.ACCUMULATE)
    few = tuple(s for s in whole.schedules if (s.direction, s.variant) != later)
    toy.plan = replace(whole, schedules=few)
    toy.step(), toy.step()
    toy.plan = whole
    toy.step()
    assert toy.written.counts == [{FORWARD: 1, BACKWARD: 1}] * 2
    for (plan, found), expected in zip(
        toy.written.times, (replace(whole, schedules=few), whole), strict=True
    ):
        assert {r.plan for r in found.values()} == {plan.digest()} == {expected.digest()}


# On lanes.

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


def test_a_task_that_has_begun_lasts_until_it_is_finished() -> None:
    """The next task begins meanwhile, and lets the first go on."""
    lanes = Lanes(Cpu(), is_blocking=True)
    gates = [Gate(), Gate()]
    pending: list[Pending] = []

    def start(run: Callable[[], object]) -> None:
        pending.append(lanes.start(Lane.INTER, run, out=torch.zeros(1), reads=[], name="test"))

    def first() -> Begun:
        return Begun(gates[0])

    def second() -> Begun:
        gates.pop(0).open()
        return Begun(lambda: None)

    steps = [replace(step, waits=()) for step in make_steps([(Kind.INTER_ALL_GATHER, 0, 1)] * 2)]
    running = Steps(
        lanes, list(zip(steps, (partial(start, first), partial(start, second)), strict=True))
    )
    written = Written()
    recorder = Recorder(1, Clock(), written)
    for _ in range(2):
        running.run(recorder)
        for p in pending:
            p.wait()
        pending.clear()
    del recorder
    ((_, found),) = written.times
    (run,) = found[FORWARD].runs
    assert run.starts_s[0] < run.starts_s[1] < run.ends_s[0] < run.ends_s[1]
    assert_in_turn(run, steps, in_flight=2)


# On devices.

STARTED = (Kind.LOAD, Kind.STORE, Kind.INTER_ALL_GATHER, Kind.INTRA_ALL_GATHER)


def random_steps(chance: random.Random) -> list[Step]:
    """Tasks that read other tasks' results, compute, and waits for tasks; all follow the earlier compute."""
    steps: list[Step] = []
    unread: list[int] = []
    for index in range(14):
        kind = chance.choice([Kind.COMPUTE, *STARTED, Kind.WAIT, Kind.FREE])
        if kind is Kind.WAIT and not unread:
            kind = Kind.COMPUTE
        waits = {s.index for s in steps if s.lane is Lane.COMPUTE}
        if kind is Kind.WAIT:
            waits.add(unread.pop(chance.randrange(len(unread))))
        elif kind in STARTED:
            waits.update(chance.sample(unread, min(len(unread), chance.randrange(3))))
            unread.append(index)
        (step,) = make_steps([(kind, None if kind is Kind.COMPUTE else 0, 0)])
        steps.append(replace(step, index=index, waits=tuple(sorted(waits))))
    return steps


class OnDevice:
    """Random steps on the lanes of a fake device; each has some kernels, which record when they run."""

    def __init__(self, simulated: SimulatedDevice, seed: int, *, is_blocking: bool) -> None:
        self._simulated = simulated
        self._random = random.Random(seed)
        self._lanes = Lanes(simulated, is_blocking=is_blocking)
        self._pending: dict[int, Pending] = {}
        self.steps = random_steps(self._random)
        self.kernels: dict[int, list[int]] = {}
        self._launched = 0
        calls = [(step, partial(self._call, step)) for step in self.steps]
        self._running = Steps(self._lanes, calls)

    def run(self, recorder: Recorder) -> bool:
        """Issue all steps; whether the device has run all kernels that were launched, which is rare."""
        self._pending.clear()
        self.kernels = {step.index: [] for step in self.steps}
        self._launched = 0
        self._running.run(recorder)
        is_at_the_end = sum(map(len, self.kernels.values())) == self._launched
        for kind in STARTED:  # a thread may still issue tasks that are not waited for
            out: Any = Buffer(self._simulated)
            self._lanes.start(LANES[kind], lambda: None, out=out, reads=[], name="").wait()
        return is_at_the_end

    def _call(self, step: Step) -> None:
        self._simulated.advance(self._random.randrange(8))
        launch = partial(self._launch, step.index, self._random.randrange(1, 4))
        if step.kind is Kind.COMPUTE:
            launch()
        elif step.kind is Kind.WAIT:
            self._pending[self._last_started(step)].wait()
        elif step.kind in STARTED:
            reads = [self._pending[i] for i in step.waits if i in self._pending]
            out: Any = Buffer(self._simulated)
            self._pending[step.index] = self._lanes.start(
                step.lane, launch, out=out, reads=reads, name="test"
            )

    def _last_started(self, step: Step) -> int:
        (started,) = (i for i in step.waits if i in self._pending)
        return started

    def _launch(self, index: int, kernels: int) -> None:
        ran = self.kernels[index]  # of this run, however far the device is
        self._launched += kernels
        for _ in range(kernels):
            self._simulated.launch(lambda: ran.append(self._simulated.time))


@pytest.mark.parametrize("is_blocking", [False, True], ids=["streams", "threads"])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_on_a_device_times_are_those_of_the_kernels(is_blocking: bool, seed: int) -> None:
    simulated = SimulatedDevice(seed)
    device = OnDevice(simulated, seed, is_blocking=is_blocking)
    written = Written()
    recorder = Recorder(1, clock_of(simulated), written)
    device.run(recorder)
    is_at_the_end = device.run(recorder)
    assert is_at_the_end or not written.times, "written before the device has come to the end"
    simulated.synchronize_all()
    del recorder
    ((_, found),) = written.times
    (run,) = found[FORWARD].runs
    assert_causal(run, device.steps)
    assert_in_turn(run, device.steps, in_flight=1)
    # Kernels' times count from the beginning, a run's from its start: all differ by one number.
    starts, ends = ([round(1e3 * s) for s in times] for times in (run.starts_s, run.ends_s))
    earliest = max((k - ends[i] for i, ks in device.kernels.items() for k in ks), default=0)
    latest = min((k - starts[i] for i, ks in device.kernels.items() for k in ks), default=0)
    assert earliest < latest or not any(device.kernels.values())


@needs_cuda
@pytest.mark.gpu
def test_on_a_real_device() -> None:
    """A copy in, a product that waits for it, a copy out; nothing synchronises before the end."""
    lanes = Lanes(Cuda(CUDA), is_blocking=False)
    host, back = (torch.ones(2048, 2048).pin_memory() for _ in range(2))
    values: dict[str, Any] = {}

    def copy(lane: Lane, out: torch.Tensor, source: Any, name: str) -> None:
        tensor = source.tensor if isinstance(source, Pending) else source
        run = partial(out.copy_, tensor, non_blocking=True)
        values[name] = lanes.start(lane, run, out=out, reads=[source], name=name)

    entries = [(Kind.LOAD, 0, 1), (Kind.WAIT, 0, 0), (Kind.COMPUTE, None, 0), (Kind.STORE, 0, 1)]
    calls: list[Callable[[], object]] = [
        lambda: copy(Lane.H2D, torch.empty_like(host, device=CUDA), host, "loaded"),
        lambda: values.update(ready=values["loaded"].wait()),
        lambda: values.update(product=values["ready"] @ values["ready"]),
        lambda: copy(Lane.D2H, back, values["product"], "stored"),
    ]
    running = Steps(lanes, list(zip(make_steps(entries), calls, strict=True)))
    written = Written()
    recorder = Recorder(2, clock_of(Cuda(CUDA)), written)
    for _ in range(3):
        running.run(recorder)
    torch.cuda.synchronize()
    del recorder
    ((_, found),) = written.times
    assert len(found[FORWARD].runs) == 2
    for run in found[FORWARD].runs:
        assert_causal(run, running.steps)
        assert all(a < b for a, b in zip(run.starts_s, run.ends_s, strict=True))
    assert torch.equal(back, torch.full_like(back, 2048))
