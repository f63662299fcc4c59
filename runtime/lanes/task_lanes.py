"""A lane that is a stream of the device, and one that is a worker thread, for tasks that block their caller.

[Note: two in flight] A collective between nodes ends with a message that other ranks wait for, and the next
one begins with such a message.  One by one, collectives would leave a slow link idle but for these messages:
on a 100 Mbit/s link, gathers of 2.5 MB reach 9.0 MB/s one by one, and 11 MB/s two at once.  So a task may
return a `Begun`; its lane goes on, and a second thread finishes the task.  Collectives still begin in order.
With Gloo and tensors on a device with streams, tasks are finished at once: their work on the lane's stream
has to be in order.

[Note: end of the interpreter] A rank that fails in a step leaves tasks behind that wait for other ranks.  The
threads are daemons, because the other ranks may never join.  But a daemon that returns from C++ while the
interpreter ends is killed there, and the whole process aborts instead of returning its exit code.  So before
the interpreter ends (atexit), `exiting` is set: tasks that block look at it now and then and close their
group (`lost_ranks`, [Note: closed groups]), and tasks that have not begun are cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Queue, SimpleQueue
from threading import Event, Thread
from traceback import clear_frames

import torch

from fcdp_compile.devices import Device, StreamDevice
from fcdp_compile.devices import Event as StreamEvent
from fcdp_compile.runtime.lanes.tasks import Begun, Done, Run
from fcdp_compile.torch_compat.autograd import name_thread

_BEGUN = 1
"""How many begun tasks may wait behind the task that is being finished; the next one blocks its lane."""

_END_S = 5.0  # for a thread at the interpreter's end: to copy a few GB, and to see `exiting`


class OnStream:
    """The end of a task on a stream."""

    def __init__(self, end: StreamEvent, device: StreamDevice) -> None:
        self._end = end
        self._device = device

    def order(self) -> None:
        self._device.current_stream().wait_event(self._end)

    def passed(self) -> None:
        pass


class StreamLane:
    """A stream; the Python thread or a lane's thread issues tasks to it."""

    def __init__(self, device: StreamDevice, *, is_urgent: bool) -> None:
        self._stream = device.new_stream(is_urgent=is_urgent)
        self._device = device

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        return self.prepared(run, after)()

    def prepared(self, run: Run, after: Sequence[Done]) -> Callable[[], Done]:
        """Return a call that issues a task after all that this thread's stream has been given by now."""
        return partial(self._issue, run, after, self._device.record())

    def _issue(self, run: Run, after: Sequence[Done], given: StreamEvent) -> Done:
        with self._device.on(self._stream):
            self._stream.wait_event(given)
            for done in after:
                done.order()
            if isinstance(left := run(), Begun):
                left.finish()
            return OnStream(self._device.record(), self._device)

    def close(self) -> None:
        pass

    def join(self) -> None:
        pass


class ThreadLane:
    """A worker thread, with its own stream if the device has streams."""

    def __init__(self, name: str, device: Device, exiting: Event, *, is_urgent: bool) -> None:
        self._stream: StreamLane | None = None
        if isinstance(device, StreamDevice):
            self._stream = StreamLane(device, is_urgent=is_urgent)
        end = partial(_Worker, Queue(_BEGUN), f"{name} end", exiting, device)
        self._worker = _Worker(SimpleQueue(), name, exiting, device, _Finisher(end))

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        """Start a task.

        held: its buffers; cleared at its end if the lane has no stream that may still use them.
        """
        call: Callable[[], object] = partial(_run_here, run, after, held)
        if self._stream is not None:
            call = self._stream.prepared(run, after)
        future: Future[object] = Future()
        self._worker.tasks.put(_Task(call, future))
        return _InThread(future)

    def close(self) -> None:
        """Let the thread end after its tasks."""
        self._worker.tasks.put(None)

    def join(self) -> None:
        """Wait, for a limited time, for the Python work of a closed lane."""
        self._worker.is_quiet.wait(_END_S)


def _run_here(run: Run, after: Sequence[Done], held: list[object]) -> Begun | None:
    left: object = None
    try:
        for done in after:
            done.order()
        left = run()
    finally:
        if not isinstance(left, Begun):
            held.clear()
    return Begun(partial(_finish_here, left, held)) if isinstance(left, Begun) else None


def _finish_here(begun: Begun, held: list[object]) -> None:
    try:
        begun.finish()
    finally:
        held.clear()


TaskLane = StreamLane | ThreadLane
"""Runs tasks one after the other."""


class _InThread:
    """The end of a task on a thread; the task may have left work on a stream."""

    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def order(self) -> None:
        if isinstance(on_stream := self._future.result(), OnStream):
            on_stream.order()

    def passed(self) -> None:
        pass  # the thread has let go


class _Task:
    """A call to make on a thread, once, and the future that gets its result or error."""

    def __init__(
        self, call: Callable[[], object], future: Future[object], *, is_begun: bool = False
    ) -> None:
        self._call = call
        self._future = future
        self.is_begun = is_begun

    def settle(self) -> _Task | None:
        """Make the call; return the task that finishes it if it has only begun."""
        call, future = self._call, self._future
        # The call holds buffers, which must be gone when the future is done.
        del self._call, self._future
        try:
            left = call()
        except BaseException as error:  # raised for the waiter
            del call
            # The task's frames hold buffers, too.  If a waiter's frame holds the future, that is a cycle:
            # without this, the buffers would stay until the garbage collector runs.
            clear_frames(error.__traceback__)
            future.set_exception(error)
            return None
        del call
        if isinstance(left, Begun):
            return _Task(left.finish, future, is_begun=True)
        future.set_result(left)
        return None

    def cancel(self) -> None:
        """Do not make the call; waiting for it raises an error."""
        del self._call
        self._future.cancel()


class _Worker:
    """A thread that runs tasks in order.  finisher: of the tasks that it has only begun."""

    def __init__(
        self,
        tasks: SimpleQueue[_Task | None] | Queue[_Task | None],
        name: str,
        exiting: Event,
        device: Device,
        finisher: _Finisher | None = None,
    ) -> None:
        self.tasks = tasks
        self.is_quiet = Event()
        self._name = name
        self._exiting = exiting
        self._device = device
        self._finisher = finisher
        Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        name_thread(self._name)
        self._device.enter_thread()
        with torch.no_grad():
            while (task := self.tasks.get()) is not None:
                if self._exiting.is_set() and not task.is_begun:
                    task.cancel()
                    continue
                left = task.settle()
                if left is not None:
                    assert self._finisher is not None, "what finishes a task has begun another"
                    self._finisher.put(left)
                del left
        if self._finisher is not None:
            self._finisher.end()
        self.is_quiet.set()


class _Finisher:
    """Finishes tasks that a thread has begun, on a thread that starts with the first such task."""

    def __init__(self, start: Callable[[], _Worker]) -> None:
        self._start = start
        self._worker: _Worker | None = None

    def put(self, begun: _Task) -> None:
        if self._worker is None:
            self._worker = self._start()
        self._worker.tasks.put(begun)

    def end(self) -> None:
        """Wait until all tasks are finished, or given up."""
        if self._worker is not None:
            self._worker.tasks.put(None)
            self._worker.is_quiet.wait()
