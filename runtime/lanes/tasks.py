"""The tasks that lanes run, and their results, which are on their way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Done(Protocol):
    """The end of a started task."""

    def order(self) -> None:
        """Order the caller's next work after the task.

        The caller's current stream waits, or its thread if the device has no streams.  May be called several
        times, by any thread.

        Raises: whatever the task raised.
        """

    def passed(self) -> None:
        """Let go of buffers that are not needed after the task; compute has been ordered after it."""


class Pending:
    """A started transfer or collective: a buffer whose contents are valid once it is done.

    Lanes take `tensor` and `done` to start later tasks; `wait` returns the result to compute on this thread's
    stream, once.

    is_full: whether a loaded bucket is the whole bucket [G*S], not its node shard [N*S].
    encoded: the same values as they were sent, if that was in another format.
    is_wrong: whether they are not what was sent, bool [1]; None if that cannot be.
    """

    __slots__ = ("_is_waited", "done", "encoded", "is_full", "is_wrong", "tensor")

    def __init__(
        self,
        tensor: Tensor,
        *,
        done: Done | None = None,
        is_full: bool = False,
        encoded: Tensor | None = None,
        is_wrong: Tensor | None = None,
    ) -> None:
        self.tensor = tensor
        self.done = done
        self.is_full = is_full
        self.encoded = encoded
        self.is_wrong = is_wrong
        self._is_waited = False

    def wait(self) -> Tensor:
        """The result, complete for the next work on this thread's stream."""
        assert not self._is_waited, "a pending step was waited for twice"
        self._is_waited = True
        if self.done is not None:
            self.done.order()
            self.done.passed()
        return self.tensor


def passed_on(value: Tensor | Pending) -> Pending:
    """The result of a step that changes nothing; callers may wait for both it and `value`."""
    if isinstance(value, Tensor):
        return Pending(value)
    return Pending(
        value.tensor,
        done=value.done,
        is_full=value.is_full,
        encoded=value.encoded,
        is_wrong=value.is_wrong,
    )


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
