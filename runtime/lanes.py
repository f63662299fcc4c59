"""The lanes beside compute, on which transfers and collectives run.

    CPU, or CUDA with Gloo     a worker thread a lane: collectives block their caller
    CUDA with NCCL             a stream a lane: nothing blocks the Python thread

A task is started with the pending results that it reads and runs after them, and after whatever its lane was
given before.  All ranks start the same tasks in the same order (their plans are compared), so lanes that
wait for each other cannot wait in a circle.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from fcdp_compile.plan import Bucket, Kind, Lane
from fcdp_compile.runtime.pending import Done, Pending
from fcdp_compile.torch_compat import is_profiling

Run = Callable[[], None]


def tensor_of(value: Tensor | Pending) -> Tensor:
    """The buffer of a value that may still be on its way."""
    return value.tensor if isinstance(value, Pending) else value


def range_name(kind: Kind, bucket: Bucket) -> str:
    """What a profiler shows of a step."""
    return f"fcdp::{kind.value} {bucket.id}"


class Lanes:
    """The lanes of one model on this rank.

    is_blocking: whether collectives block their caller, so that each lane needs a thread.
    """

    def __init__(self, device: torch.device, *, is_blocking: bool) -> None:
        self._device = device
        self._is_blocking = is_blocking or device.type != "cuda"
        self._lanes: dict[Lane, _Lane] = {}

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
            if self._is_blocking:
                threaded = _ThreadLane(f"fcdp {lane.value}", self._device)
                weakref.finalize(self, threaded.close)
                self._lanes[lane] = threaded
            else:
                self._lanes[lane] = _StreamLane(self._device)
        return self._lanes[lane]


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


class _StreamLane:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._running: deque[tuple[torch.cuda.Event, list[object]]] = deque()

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        self._release_finished()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for done in after:
                done.order()
            run()
            event = torch.cuda.Event()
            event.record()
        self._running.append((event, held))
        return _OnStream(event)

    def _release_finished(self) -> None:
        # What nobody waits for (an intra-node reduction goes on between nodes) must not pile up.
        while self._running and self._running[0][0].query():
            self._running.popleft()[1].clear()


class _OnStream:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def order(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class _ThreadLane:
    """A worker thread; with a stream of its own where buffers are on a CUDA device."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        # A daemon: an interpreter that exits while a peer is gone must not wait for it.
        Thread(target=_work, args=(self._tasks,), name=name, daemon=True).start()

    def start(self, run: Run, after: Sequence[Done], held: list[object]) -> Done:
        task = _Task(run, after, held, self._stream)
        self._tasks.put(task)
        return _InThread(task.future)

    def close(self) -> None:
        """Let the thread end after what it was given."""
        self._tasks.put(None)


class _InThread:
    def __init__(self, future: Future[torch.cuda.Event | None]) -> None:
        self._future = future

    def order(self) -> None:
        if (event := self._future.result()) is not None:
            torch.cuda.current_stream().wait_event(event)


class _Task:
    def __init__(
        self,
        run: Run,
        after: Sequence[Done],
        held: list[object],
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.future: Future[torch.cuda.Event | None] = Future()
        self._run = run
        self._after = after
        self._held = held
        self._stream = stream
        self._issued = None
        if stream is not None:
            self._issued = torch.cuda.Event()
            self._issued.record()

    def __call__(self) -> None:
        try:
            if self._stream is None:
                self._follow()
                self._held.clear()
                self.future.set_result(None)
                return
            with torch.cuda.stream(self._stream):
                assert self._issued is not None
                self._stream.wait_event(self._issued)
                self._follow()
                event = torch.cuda.Event()
                event.record()
            self.future.set_result(event)
        except BaseException as error:  # handed to whoever waits
            self.future.set_exception(error)

    def _follow(self) -> None:
        for done in self._after:
            done.order()
        self._run()


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    with torch.no_grad():
        while (task := tasks.get()) is not None:
            task()
            del task  # not until the next one comes
