"""Times of steps: which runs are recorded, when steps start and end, and when the file is written."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from builders_graph import Lowered, Where, lower_toy
from builders_plan import make_plan
from fcdp_compile.passes.describe import describe
from fcdp_compile.plan import Direction, Kind, Lane, Plan, Schedule, Tier, Variant
from fcdp_compile.plan.recording import ScheduleKey
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.runtime.recorder import Recorder
from tests.recorded import assert_causal, assert_in_turn
from tests.runtime.fake_model import fake_model, program, same_on_all_ranks
from tests.runtime.on_lanes import Gate
from tests.runtime.recorders import FORWARD, Clock, Written

EVEN = {"w": (8, 4), "b": (4,)}
X, T = torch.tensor(3.0), torch.tensor(2.0)
BACKWARD = (Direction.BACKWARD, Variant.COLD)


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
