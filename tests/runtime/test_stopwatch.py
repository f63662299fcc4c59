"""Times and decisions are equal on every rank, even if the ranks' clocks differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from fcdp_compile.cluster.link_fit import Timed
from fcdp_compile.devices import Cpu
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.tools.probe.stopwatch import Stopwatch

CPU = Cpu()


class Others:
    """Takes the place of the other ranks: answers with all ranks' numbers instead of this rank's measurement.

    seconds: the slowest rank's time of the run that was last counted.  clock_s: rank 0's clock.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self.clock_s = 0.0
        self.agreements = 0

    def agree(self, words: list[int], what: str = "") -> list[list[int]]:
        self.agreements += 1
        if len(words) == 1:
            return [words, words]
        seconds = self._seconds()
        self.clock_s += seconds
        clock_ns = int(1e9 * self.clock_s)
        return [[int(0.4e9 * seconds), clock_ns], [int(1e9 * seconds), 17], [*words[:1], 0]]


def watch(others: Others) -> Stopwatch:
    return Stopwatch(cast(Collectives, others), CPU)


def test_the_slowest_rank_counts() -> None:
    others = Others(lambda: 3.0)
    assert watch(others).of_each_s(lambda: None) == pytest.approx(3.0)
    assert watch(others).of_each_s(lambda: None, 4) == pytest.approx(0.75)
    assert others.agreements == 4, "one to begin together and one for the times, each"


def test_this_rank_counts_if_it_is_the_slowest() -> None:
    assert watch(Others(lambda: 1e-9)).of_each_s(lambda: time.sleep(0.02)) >= 0.02


@pytest.mark.parametrize(
    ("each_s", "budget_s", "runs"),
    [
        (0.002, 1.0, 1 + 4 + 20 * 9),  # 40 ms in a row, nine rounds
        (1.0, 20.0, 1 + 4 + 4 * 5),
        (1.0, 0.0, 1 + 4 + 4 * 3),  # a median needs three, however long they take
        (1e-7, 1.0, 1 + 4 + 256 * 9),
    ],
)
def test_repetitions_follow_from_the_times(each_s: float, budget_s: float, runs: int) -> None:
    calls: list[None] = []
    before = [0]

    def seconds() -> float:
        count, before[0] = len(calls) - before[0], len(calls)
        return each_s * count

    watch(Others(seconds)).median_s(lambda: calls.append(None), budget_s=budget_s)
    # This rank's own measurements are far below: the other ranks' numbers decided.
    assert len(calls) == runs


def test_a_row_is_started_ahead() -> None:
    """Three are under way; the fourth is started when the first has ended."""
    events: list[str] = []

    class Done:
        def __init__(self, name: str) -> None:
            self._name = name

        def order(self) -> None:
            events.append(f"end {self._name}")

        def passed(self) -> None:
            pass

    def run() -> Pending:
        name = str(sum(e.startswith("start") for e in events))
        events.append(f"start {name}")
        return Pending(torch.empty(1), done=Done(name))

    watch(Others(lambda: 1.0)).of_each_s(run, 5)
    started = [f"start {i}" for i in range(3)]
    after = ["end 0", "start 3", "end 1", "start 4", "end 2", "end 3", "end 4"]
    assert events == [*started, *after]


def sweep_of(seconds_of: Callable[[int], float], budget_s: float) -> tuple[list[Timed], list[int]]:
    """Times of a sweep over 4, 16, ..., 4^6, and the sizes that were begun."""
    now = [0, 0]
    begun: list[int] = []

    def seconds() -> float:
        count, now[1] = now[1], 0
        return seconds_of(now[0]) * count

    def make(size: int) -> tuple[int, Callable[[], Any]]:
        now[0] = size
        begun.append(size)

        def run() -> None:
            now[1] += 1

        return 2 * size, run

    found = watch(Others(seconds)).sweep(make, [4**i for i in range(1, 7)], budget_s=budget_s)
    return found, begun


def test_a_sweep_ends_where_its_time_does() -> None:
    found, begun = sweep_of(lambda size: size / 100, budget_s=40.0)
    assert [t.bytes for t in found] == [8, 32, 128]
    assert [t.seconds for t in found] == pytest.approx([0.04, 0.16, 0.64])
    assert begun == [4, 4, 16, 64], "what cannot fit is not begun"


def test_a_sweep_with_time_has_all_sizes() -> None:
    found, begun = sweep_of(lambda size: size / 1e6, budget_s=20.0)
    assert begun == [4, *(4**i for i in range(1, 7))]
    assert len(found) == 6


def test_what_connects_a_group_is_not_counted() -> None:
    first = iter([1000.0])
    found, _ = sweep_of(lambda size: next(first, size / 1e6), budget_s=20.0)
    assert len(found) == 6


def test_two_sizes_are_measured_in_any_case() -> None:
    assert len(sweep_of(lambda size: size * 10.0, budget_s=0.0)[0]) == 2


def test_a_size_that_takes_much_longer_than_expected_is_left() -> None:
    found, begun = sweep_of(lambda size: 0.01 if size < 64 else 100.0, budget_s=20.0)
    assert begun == [4, 4, 16, 64], "one run of it showed how long it takes"
    assert [t.bytes for t in found] == [8, 32]


def test_what_runs_beside_is_started_before_and_ended_after() -> None:
    events: list[str] = []

    class Done:
        def order(self) -> None:
            events.append("beside ended")

        def passed(self) -> None:
            pass

    def start() -> list[Pending]:
        events.append("beside started")
        return [Pending(torch.empty(1), done=Done())]

    times = iter([9.0, 1.0, 2.0, 3.0])
    found = watch(Others(lambda: next(times))).median_beside_s(lambda: events.append("run"), start)
    assert found == pytest.approx(2.0), "the first run warms up"
    assert events == 4 * ["beside started", "run", "beside ended"]
