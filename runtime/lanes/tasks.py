"""What lanes run, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from fcdp_compile.runtime.lanes.pending import Done

Run = Callable[[], object]
"""A task; it may return that it has only `Begun`."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a task returns that needs the lane no longer, but is done only when `finish` returns."""

    finish: Callable[[], object]


def within(context: Callable[[], AbstractContextManager[Any]], run: Run) -> Run:
    """A task in a context, also what it has only begun."""

    def inside() -> object:
        with context():
            left = run()
        return Begun(within(context, left.finish)) if isinstance(left, Begun) else left

    return inside


class TaskLane(Protocol):
    """Runs tasks one after the other."""

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        """Start a task.

        held: its buffers; cleared at its end where nothing of it is done later, on a stream.
        """

    def close(self) -> None:
        """Take no more tasks, and let go of what is not needed for those there are."""

    def join(self) -> None:
        """Wait for what a closed lane does in Python, within reason."""
