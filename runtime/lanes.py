"""The lanes beside compute, on which transfers and collectives run.

    CPU, or CUDA with Gloo     a worker thread a lane: collectives block their caller
    CUDA with NCCL             a stream a lane: nothing blocks the Python thread

A task is started with the pending results that it reads and runs after them, and after whatever its lane was
given before.  All ranks start the same tasks in the same order (their plans are compared), so lanes that
wait for each other cannot wait in a circle.

[Note: end of the interpreter] A rank that fails in a step leaves tasks behind that wait for its peers.  The
threads are daemons, because their peers may never come.  But a daemon that comes back from C++ while the
interpreter ends is killed inside of it, and the whole process aborts in place of its own exit code.  So
before the interpreter ends (atexit), `exiting` is set, tasks that block look at it now and then and give up,
and those that have not begun are cancelled.  What was given up is still under way, and its process group
would wait for it when it goes, as long as the peers live: so the thread stays, and holds it.
"""

from __future__ import annotations

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from traceback import clear_frames
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from fcdp_compile.plan import Bucket, Kind, Lane
from fcdp_compile.runtime.pending import Done, Pending
from fcdp_compile.torch_compat import is_profiling, name_thread

_END_S = 5.0  # for a thread at the end of the interpreter: a copy of a few GB, and what looks at `exiting`

Run = Callable[[], object]


def tensor_of(value: Tensor | Pending) -> Tensor:
    """The buffer of a value that may still be on its way."""
    return value.tensor if isinstance(value, Pending) else value


def range_name(kind: Kind, bucket: Bucket) -> str:
    """What a profiler shows of a step."""
    return f"fcdp::{kind.value} {bucket.id}"


class Lanes:
    """The lanes of one model on this rank.

    is_blocking: whether collectives block their caller, so that each lane needs a thread.
    exiting: set when the interpreter ends ([Note: end of the interpreter]).
    """

    def __init__(self, device: torch.device, *, is_blocking: bool) -> None:
        self.exiting = Event()
        self._device = device
        self._is_blocking = is_blocking or device.type != "cuda"
        self._lanes: dict[Lane, _Lane] = {}
        give_up = partial(_give_up, self._lanes, self.exiting)
        atexit.register(give_up)
        weakref.finalize(self, _close, self._lanes, give_up).atexit = False

    def start(
        self, lane: Lane, run: Run, *, out: Tensor, reads: Sequence[Tensor | Pending], name: str
    ) -> Pending:
        """Run `run`, which reads `reads` and fills `out`, on a lane.

        `out` must be allocated by the caller: memory belongs to the compute stream, and a lane touches it
        only after what the compute stream was given before.
        """
        after = [r.done for r in reads if isinstance(r, Pending) and r.done is not None]
        held: list[object] = [out, *reads]
        done = self._lane(lane).start(_named(name, run), after, held)
        return Pending(out, done=done, held=held)

    def _lane(self, lane: Lane) -> _Lane:
        if lane not in self._lanes:
            self._lanes[lane] = (
                _ThreadLane(f"fcdp {lane.value}", self._device, self.exiting)
                if self._is_blocking
                else _StreamLane(self._device)
            )
        return self._lanes[lane]


def _close(lanes: dict[Lane, _Lane], give_up: Callable[[], None]) -> None:
    atexit.unregister(give_up)
    for lane in lanes.values():
        lane.close()


def _give_up(lanes: dict[Lane, _Lane], exiting: Event) -> None:
    exiting.set()
    for lane in lanes.values():
        lane.close()
    for lane in lanes.values():
        lane.join()


def _named(name: str, run: Run) -> Run:
    if not is_profiling():
        return run

    def named() -> None:
        with record_function(name):
            run()

    return named


class _Lane(Protocol):
    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        """Start a task; `held` is cleared as soon as the task needs its buffers no longer."""

    def close(self) -> None:
        """Take no more tasks, and let go of what is not needed for those there are."""

    def join(self) -> None:
        """Wait for what a closed lane does in Python, within reason."""


class _Stream:
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
                run()
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


class _OnStream:
    def __init__(self, end: torch.cuda.Event, device: torch.device) -> None:
        self._end = end
        self._device = device

    def order(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end)


class _StreamLane:
    """A stream that the Python thread issues to itself."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _Stream(device)
        self._device = device

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        given = torch.cuda.current_stream(self._device).record_event()
        return _OnStream(self._stream.issue(run, after, held, given), self._device)

    def close(self) -> None:
        pass

    def join(self) -> None:
        pass


class _ThreadLane:
    """A worker thread; with a stream of its own where buffers are on a CUDA device."""

    def __init__(self, name: str, device: torch.device, exiting: Event) -> None:
        self._device = device
        self._stream = _Stream(device) if device.type == "cuda" else None
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._is_quiet = Event()
        args = (self._tasks, name, exiting, self._is_quiet)
        Thread(target=_work, args=args, name=name, daemon=True).start()

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        call: Callable[[], Done | None] = partial(_run_here, run, after, held)
        if self._stream is not None:
            given = torch.cuda.current_stream(self._device).record_event()
            issued = partial(self._stream.issue, run, after, held, given)
            call = partial(_issue_here, issued, self._device)
        future: Future[Done | None] = Future()
        self._tasks.put(_Task(call, future))
        return _InThread(future)

    def close(self) -> None:
        """Let the thread end after what it was given."""
        self._tasks.put(None)

    def join(self) -> None:
        self._is_quiet.wait(_END_S)


def _run_here(run: Run, after: Sequence[Done], held: list[object]) -> None:
    try:
        for done in after:
            done.order()
        run()
    finally:
        held.clear()


def _issue_here(issued: Callable[[], torch.cuda.Event], device: torch.device) -> Done:
    return _OnStream(issued(), device)


class _InThread:
    """The end of a task on a thread; it may have left something behind on a stream."""

    def __init__(self, future: Future[Done | None]) -> None:
        self._future = future

    def order(self) -> None:
        if (on_stream := self._future.result()) is not None:
            on_stream.order()


class _Task:
    """A call to make on a thread, once, and the future that learns what became of it."""

    def __init__(self, call: Callable[[], Done | None], future: Future[Done | None]) -> None:
        self._call = call
        self._future = future

    def settle(self, exiting: Event) -> BaseException | None:
        """Make the call; returns its error if it was given up."""
        call, future = self._call, self._future
        # The call holds buffers, and whoever waits may count on them being gone.
        del self._call, self._future
        try:
            left = call()
        except BaseException as error:  # handed to whoever waits
            del call
            is_given_up = exiting.is_set()
            if not is_given_up:
                # Frames of the task hold buffers too.  A waiter's frame that holds the future closes a
                # circle, so without this they would be there until the garbage collector comes.
                clear_frames(error.__traceback__)
            future.set_exception(error)
            return error if is_given_up else None
        del call
        future.set_result(left)
        return None

    def cancel(self) -> None:
        """Do not make the call; who waits for it gets an error."""
        del self._call
        self._future.cancel()


def _work(tasks: SimpleQueue[_Task | None], name: str, exiting: Event, is_quiet: Event) -> None:
    name_thread(name)
    given_up: list[BaseException] = []  # their frames hold the groups
    with torch.no_grad():
        while (task := tasks.get()) is not None:
            if exiting.is_set():
                task.cancel()
            elif (error := task.settle(exiting)) is not None:
                given_up.append(error)
    is_quiet.set()
    if given_up:
        Event().wait()  # for ever: [Note: end of the interpreter]
