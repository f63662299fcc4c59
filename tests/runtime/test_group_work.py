"""Waiting for a collective that blocks: looking now and then must never change what it comes to."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from threading import Event

import pytest

from fcdp_compile.runtime import group_work


class Work:
    """A collective that is done after some looks, in the middle of one or right after it."""

    def __init__(self, looks: int, error: str | None = None, on_look: Callable[[], None] = int):
        self._left = looks
        self._error = error
        self._on_look = on_look

    def is_completed(self) -> bool:
        return self._left <= 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self._on_look()
        if self._left > 0:
            assert timeout is not None, "it would block"
            self._left -= 1  # done right after this look, which does not know it
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise RuntimeError(self._error)


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_collective_that_is_done_right_after_a_look_has_not_failed(looks: int) -> None:
    group_work.finish(Work(looks), Event())


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_a_failure_is_told_as_it_is(looks: int) -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        group_work.finish(Work(looks, "closed by peer"), Event())


def test_it_gives_up_when_the_interpreter_ends() -> None:
    exiting = Event()
    with pytest.raises(RuntimeError, match="timed out"):
        group_work.finish(Work(1000, on_look=exiting.set), exiting)
