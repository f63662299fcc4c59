"""The tasks that lanes run, and their ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from fcdp_compile.runtime.lanes.pending import Done

Run = Callable[[], object]
"""A task; it may return a `Begun` if it is not done yet."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Returned by a task that no longer needs the lane, but is done only when `finish` returns."""

    finish: Callable[[], object]


def within(context: Callable[[], AbstractContextManager[Any]], run: Run) -> Run:
    """A task that runs in a context, and also finishes in one if it has only begun."""

    def inside() -> object:
        with context():
            left = run()
        return Begun(within(context, left.finish)) if isinstance(left, Begun) else left

    return inside


class TaskLane(Protocol):
    """Runs tasks one after the other."""

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        """Start a task.

        held: its buffers; cleared at its end if the lane has no stream that may still use them.
        """

    def close(self) -> None:
        """Take no more tasks; those that were started go on."""

    def join(self) -> None:
        """Wait, for a limited time, for the Python work of a closed lane."""
