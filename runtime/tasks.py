"""What lanes run, and what they leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fcdp_compile.runtime.pending import Done

Run = Callable[[], object]
"""A task; it may return that it has only `Begun`."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a task returns that needs the lane no longer, but is done only when `finish` returns."""

    finish: Callable[[], object]


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
