"""Troubles of nodes while a job runs: cut cables, slow cables, slow processors.

Times count from the moment when the ranks of all nodes have started.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.cluster.nodes import Nodes
from benchmarks.cluster.processes import send
from benchmarks.cluster.rates import read_rate

_PERIOD_S = 0.1
"""In each period a straggler runs once and stops once."""
_TICK_S = 0.1
"""The longest time between two looks at the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CableCut:
    """A node's cable is out from at_s on, for for_s seconds; None: until the end."""

    node: int
    at_s: float
    for_s: float | None

    @staticmethod
    def read(text: str) -> CableCut:
        """Read NODE@SECONDS[:SECONDS]."""
        node, begin, length = _split(text, "@", "NODE@SECONDS, such as 1@20", last=":")
        return CableCut(
            node=_node(node),
            at_s=_seconds(begin),
            for_s=None if length is None else _seconds(length),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A node's cable carries at most bits_per_s each way from at_s on.

    bits_per_s: None for no limit.  at_s: None for a limit from before the start.
    """

    node: int
    bits_per_s: int | None
    at_s: float | None

    @staticmethod
    def read(text: str) -> Slow:
        """Read NODE=RATE[@SECONDS]."""
        node, rate, begin = _split(text, "=", "NODE=RATE, such as 1=100mbit", last="@")
        at_s = None if begin is None else _seconds(begin)
        return Slow(node=_node(node), bits_per_s=read_rate(rate), at_s=at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The processes of a node run for this fraction of the time, and are stopped for the rest."""

    node: int
    fraction: float

    @staticmethod
    def read(text: str) -> Straggler:
        """Read NODE=FRACTION."""
        node, fraction, _ = _split(text, "=", "NODE=FRACTION, such as 1=0.5")
        value = _number(fraction)
        if not 0 < value < 1:
            raise ValueError(f"a straggler's fraction is above 0 and below 1, not {fraction}")
        return Straggler(node=_node(node), fraction=value)


class Timetable:
    """Brings a job's troubles to its nodes at their times.

    slow: limits without a time begin when the timetable is made.
    """

    def __init__(
        self,
        nodes: Nodes,
        *,
        cuts: Sequence[CableCut] = (),
        slow: Sequence[Slow] = (),
        stragglers: Sequence[Straggler] = (),
    ) -> None:
        events: list[tuple[float, Callable[[], None]]] = []
        for each in slow:
            if each.at_s is None:
                nodes.limit(each.node, each.bits_per_s)
            else:
                events.append((each.at_s, partial(nodes.limit, each.node, each.bits_per_s)))
        for cut in cuts:
            events.append((cut.at_s, partial(nodes.cut, cut.node)))
            if cut.for_s is not None:
                events.append((cut.at_s + cut.for_s, partial(nodes.join, cut.node)))
        self._events = sorted(events, key=lambda event: event[0])
        self._nodes = nodes
        self._stragglers = stragglers
        self._stopped: set[int] = set()

    def advance(self, ranks_began_s: float | None) -> float:
        """Start the troubles that are due; returns how long to sleep.

        ranks_began_s: when all ranks had started, by `time.monotonic`; None before.
        """
        now_s = time.monotonic()
        while ranks_began_s is not None and self._events:
            at_s, happen = self._events[0]
            if ranks_began_s + at_s > now_s:
                break
            del self._events[0]
            happen()
        into_period_s = now_s % _PERIOD_S
        wake_s = _TICK_S
        for straggler in self._stragglers:
            runs_s = straggler.fraction * _PERIOD_S
            is_stopped = into_period_s >= runs_s
            self._stop(straggler.node, is_stopped=is_stopped)
            wake_s = min(wake_s, (_PERIOD_S if is_stopped else runs_s) - into_period_s)
        return max(wake_s, 0.001)

    def _stop(self, node: int, *, is_stopped: bool) -> None:
        if is_stopped != (node in self._stopped):
            send(signal.SIGSTOP if is_stopped else signal.SIGCONT, self._nodes.processes(node))
            self._stopped ^= {node}


def _split(
    text: str, mark: str, form: str, *, last: str | None = None
) -> tuple[str, str, str | None]:
    """Split a text at `mark`, and the rest at `last`; the third part is None if there is no `last`."""
    first, found, rest = text.partition(mark)
    if not found:
        raise ValueError(f"{text!r} has no {mark!r}; write {form}")
    if last is None:
        return first, rest, None
    second, found, third = rest.partition(last)
    return first, second, third if found else None


def _node(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no number of a node; nodes are counted from 0")
    return int(text)


def _seconds(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1e6:
        raise ValueError(f"{text!r} is no time; write seconds, 0 or more")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no number")
    return value
