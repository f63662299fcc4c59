"""Time operations that all ranks run at once; all ranks get the same figures.

[Note: one verdict] Ranks exchange every time before they use it: the slowest rank's time counts, and the
clock is rank 0's.  So the number of repetitions, and the size at which a sweep runs out of time, follow from
equal numbers on all ranks.  A rank that used its own clock would leave others waiting in a collective.

[Note: in a row] The steps that a schedule gives to a lane run in a row and are started ahead, and the cost
model's lanes run one step after the other.  So a time here is what one of several runs in a row adds: 408 ms
for a gather of 8 MiB over a simulated link of 200 Mbit/s, but 444 ms with a wait after each run.
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
from fcdp_compile.runtime.lanes.tasks import Pending

_LEAST_S = 0.04
"""The duration of a row of short runs: ranks begin up to a millisecond apart (Gloo), and if they share cores,
some milliseconds pass before each rank has had one."""
_IN_A_ROW = range(4, 257)
_AHEAD = 3
"""How many runs are started before the first is waited for; a thread's lane runs two at once."""
_ROUNDS = range(3, 10)
"""How many rows a median may be taken of."""
_LEAST_RUNS = 1 + _IN_A_ROW.start * (1 + _ROUNDS.start)
"""The fewest runs of one size: one to warm up, one row to estimate the time, and the rows of the median."""
_LEAST_SIZES = 2
"""A line needs two sizes, however long they take."""

Run = Callable[[], Pending | None]
"""Starts a transfer or collective, or computes."""


class Stopwatch:
    """Times on the slowest rank; all ranks must call every method in the same order ([Note: one verdict])."""

    def __init__(self, collectives: Collectives, device: Device) -> None:
        self._collectives = collectives
        self._device = device
        self._began_ns = time.perf_counter_ns()
        self._now_s = 0.0

    def of_each_s(self, run: Run, count: int = 1) -> float:
        """Seconds that each of `count` runs in a row takes ([Note: in a row])."""

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
        """The median of as many rows as fit into the budget, after a run to warm up."""
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
        """The median of a few runs, each beside the work that `start` starts."""
        return statistics.median([self._time(run, start) for _ in range(_ROUNDS.start + 1)][1:])

    def sweep(
        self,
        make: Callable[[int], tuple[int, Run]],
        sizes: Sequence[int],
        *,
        budget_s: float,
    ) -> list[Timed]:
        """Times over ascending sizes, up to the last size that fits into the budget.

        make: for a size, returns the bytes that are really moved and the function to run.
        """
        self.of_each_s(make(sizes[0])[1])  # a group's first collective connects it, for seconds
        until_s = self._now_s + budget_s
        found: list[Timed] = []
        for i, size in enumerate(sizes):
            is_needed = i < _LEAST_SIZES
            # The time grows at least in proportion to the size; a size that does not fit is not begun.
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
        self._device.synchronize()  # for compute, and the work that compute waits for; other work runs on
        ended = time.perf_counter_ns()
        for pending in beside:
            pending.wait()
        self._device.synchronize()
        rows = self._collectives.agree([ended - began, ended - self._began_ns])
        self._now_s = rows[0][1] / 1e9
        return max(1, *(row[0] for row in rows)) / 1e9


def _within(bounds: range, number: int) -> int:
    return min(max(number, bounds.start), bounds.stop - 1)
