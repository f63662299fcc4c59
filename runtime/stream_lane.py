"""A lane that is a CUDA stream, to which the Python thread issues."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from fcdp_compile.runtime.pending import Done
from fcdp_compile.runtime.tasks import Begun, Run


class Stream:
    """A CUDA stream that tasks are issued to, and the buffers that it may still read or write."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._in_use: deque[tuple[torch.cuda.Event, list[object]]] = deque()

    def issue(
        self, run: Run, after: Sequence[Done], held: list[object], given: torch.cuda.Event
    ) -> torch.cuda.Event:
        """Issue a task to come after the event `given`; returns the event of its end."""
        self._release_finished()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(given)
            end = torch.cuda.Event()
            try:
                for done in after:
                    done.order()
                if isinstance(left := run(), Begun):
                    left.finish()
            finally:
                end.record()
                # An invariant: not everything is waited for (an intra-node reduction goes on between nodes,
                # and a step that failed drops what it had started), and what a stream still reads or writes
                # must not go back to the allocator.
                self._in_use.append((end, held))
        return end

    def _release_finished(self) -> None:
        while self._in_use and self._in_use[0][0].query():
            self._in_use.popleft()[1].clear()


class OnStream:
    """The end of a task on a stream."""

    def __init__(self, end: torch.cuda.Event, device: torch.device) -> None:
        self._end = end
        self._device = device

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)


class StreamLane:
    """A stream that the Python thread issues to itself."""

    def __init__(self, device: torch.device) -> None:
        self._stream = Stream(device)
        self._device = device

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        given = torch.cuda.current_stream(self._device).record_event()
        return OnStream(self._stream.issue(run, after, held, given), self._device)

    def close(self) -> None:
        pass

    def join(self) -> None:
        pass
