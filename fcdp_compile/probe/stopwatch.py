"""How long something takes that all ranks do at once, in figures that all ranks share.

[Note: one verdict] Every time is exchanged before anything is made of it: the slowest rank's counts, and the
clock is rank 0's.  So how often something is repeated, and where a sweep ends for lack of time, follows from
numbers that all ranks have alike.  A rank that went by its own clock would leave others in a collective.

[Note: in a row] What a schedule gives a lane runs in a row, started ahead, and the cost model's lanes take
one step after the other.  So a time here is what one of several in a row adds.  With each waited for before
the next is started, a gather of 8 MiB over a simulated link of 200 Mbit/s took 444 ms, in a row 408.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from fcdp_compile.cluster.link_fit import Timed
from fcdp_compile.devices import Device
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.lanes.pending import Pending

_LEAST_S = 0.04
"""A row takes about so long where runs are short: ranks begin up to a millisecond apart (Gloo), and where
they share cores some milliseconds pass before each has had one."""
_IN_A_ROW = range(4, 257)
_AHEAD = 3
"""How many are started before the first of them is waited for; two are under way on a thread's lane."""
_ROUNDS = range(3, 10)
"""How many times a median may be of."""
_LEAST_RUNS = 1 + _IN_A_ROW.start * (1 + _ROUNDS.start)
"""Of one size: to warm up, to learn how long it takes, and for the median."""
_LEAST_SIZES = 2
"""A line needs two, however long they take."""

Run = Callable[[], Pending | None]
"""Starts a transfer or collective, or computes."""


class Stopwatch:
    """Times on the slowest rank; all ranks must call every method, in one order ([Note: one verdict])."""

    def __init__(self, collectives: Collectives, device: Device) -> None:
        self._collectives = collectives
        self._device = device
        self._began_ns = time.perf_counter_ns()
        self._now_s = 0.0

    def of_each_s(self, run: Run, count: int = 1) -> float:
        """Seconds that one of `count` runs in a row takes ([Note: in a row])."""

        def row() -> None:
            under_way: deque[Pending] = deque()
            for _ in range(count):
                if len(under_way) == _AHEAD:
                    under_way.popleft().wait()
                if (pending := run()) is not None:
                    under_way.append(pending)
            for pending in under_way:
                pending.wait()

        return self._time(row, list) / count

    def median_s(self, run: Run, *, budget_s: float) -> float:
        """The median of several rows, of as many as fit into a time, once it has warmed up."""
        self.of_each_s(run)
        return self._median_s(run, budget_s)

    def _median_s(self, run: Run, budget_s: float) -> float:
        each_s = self.of_each_s(run, _IN_A_ROW.start)
        in_a_row = _within(_IN_A_ROW, math.ceil(_LEAST_S / each_s))
        rounds = _within(_ROUNDS, int(budget_s / (in_a_row * each_s)))
        return statistics.median(self.of_each_s(run, in_a_row) for _ in range(rounds))

    def median_beside_s(
        self, run: Callable[[], object], start: Callable[[], Sequence[Pending]]
    ) -> float:
        """The median of a few runs, each with what `start` starts under way beside it."""
        return statistics.median([self._time(run, start) for _ in range(_ROUNDS.start + 1)][1:])

    def sweep(
        self,
        make: Callable[[int], tuple[int, Run]],
        sizes: Sequence[int],
        *,
        budget_s: float,
    ) -> list[Timed]:
        """Times over ascending sizes, up to the last one that fits into the time.

        make: of about a size, what to run and the bytes that it moves.
        """
        self.of_each_s(make(sizes[0])[1])  # a group's first collective connects it, for seconds
        until_s = self._now_s + budget_s
        found: list[Timed] = []
        for i, size in enumerate(sizes):
            is_needed = i < _LEAST_SIZES
            # At least as much longer than the last size as it is larger: what does not fit is not begun.
            if (
                not is_needed
                and _LEAST_RUNS * found[-1].seconds * size / sizes[i - 1] > until_s - self._now_s
            ):
                break
            moved_bytes, run = make(size)
            first_s = self.of_each_s(run)
            left_s = until_s - self._now_s
            if not is_needed and (_LEAST_RUNS - 1) * first_s > left_s:
                break
            found.append(Timed(moved_bytes, self._median_s(run, left_s / 4)))
        return found

    def _time(self, run: Callable[[], object], start: Callable[[], Sequence[Pending]]) -> float:
        self._collectives.agree([0])  # so that all begin together
        beside = start()
        began = time.perf_counter_ns()
        run()
        self._synchronize()
        ended = time.perf_counter_ns()
        for pending in beside:
            pending.wait()
        self._synchronize()
        rows = self._collectives.agree([ended - began, ended - self._began_ns])
        self._now_s = rows[0][1] / 1e9
        return max(1, *(row[0] for row in rows)) / 1e9

    def _synchronize(self) -> None:
        """Wait for compute, and so for what it waits for; what else is under way runs on."""
        self._device.synchronize()


def _within(bounds: range, number: int) -> int:
    return min(max(number, bounds.start), bounds.stop - 1)
