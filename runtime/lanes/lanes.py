"""The lanes beside compute, on which transfers and collectives run.

    CPU, or a GPU with Gloo   one worker thread for each lane: collectives block their caller
    a GPU with NCCL           one stream for each lane: nothing blocks the Python thread

A task is started with the pending results that it reads; it runs after them, and after the earlier tasks of
its lane.  All ranks start the same tasks in the same order (their plans are compared), so lanes that wait for
each other cannot wait in a circle.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Event

import torch
from torch import Tensor
from torch.profiler import record_function

from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.devices import Device, StreamDevice
from fcdp_compile.plan import Bucket, Kind, Lane
from fcdp_compile.plan.lane_clocks import Clock, LaneClocks
from fcdp_compile.runtime.lanes.task_lanes import StreamLane, TaskLane, ThreadLane
from fcdp_compile.runtime.lanes.tasks import Done, Pending, Run, within
from fcdp_compile.torch_compat.autograd import is_profiling

_URGENT = (Lane.INTER, Lane.INTRA)
"""Collectives must not queue behind kernels that fill the whole GPU; copies do not compete with kernels."""

Timed = Callable[[Lane, Run], Run]
"""Wraps a task of a lane so that its start and end are timed."""


def tensor_of(value: Tensor | Pending) -> Tensor:
    """The buffer of a value that may still be on its way."""
    return value.tensor if isinstance(value, Pending) else value


def range_name(kind: Kind, bucket: Bucket) -> str:
    """The name of a step's range in a profiler."""
    return f"fcdp::{kind.value} {bucket.params[0].name if bucket.id < 0 else bucket.id}"


class Scratch:
    """Memory that only one task of a lane needs.

    Where the Python thread issues to streams, the memory comes from the stream that is current when the task
    is asked for, as the task's result does, and is held as long: compute cannot use the memory of a lane's
    stream after the task.

    device: None if the lane has a thread, which allocates for itself.
    """

    def __init__(self, device: StreamDevice | None) -> None:
        self._device = device
        self._stream = None if device is None else device.current_stream()
        self._held: list[Tensor] = []

    def empty(self, like: Tensor, elements: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor [elements] on the device of `like`; dtype: by default that of `like`."""
        # Not `new_empty`, which torch's CUDA sanitizer takes for a read of `like`.
        make = partial(torch.empty, elements, dtype=dtype or like.dtype, device=like.device)
        if self._device is None or self._stream is None:
            return make()
        with self._device.on(self._stream):
            made: Tensor = make()
        self._held.append(made)
        return made


class Ordered:
    """The end of a task whose buffers are let go in stream order (`plan.lane_clocks`)."""

    __slots__ = ("_done", "_order", "clock")

    def __init__(self, done: Done, clock: Clock, order: LaneClocks[list[object]]) -> None:
        self._done = done
        self._order = order
        self.clock = clock

    def order(self) -> None:
        self._done.order()

    def passed(self) -> None:
        for held in self._order.let_go(self.clock):
            held.clear()


class Lanes:
    """The lanes of the models of one mesh on this rank.

    device: the lanes move data to and from it.
    is_blocking: whether collectives block their caller, so that each lane needs a thread.
    exiting: set when the interpreter ends ([Note: end of the interpreter] in `task_lanes`).
    """

    def __init__(self, device: Device, *, is_blocking: bool) -> None:
        self.exiting = Event()
        self.device = device
        # The device whose streams the Python thread issues to; None: every lane has a thread.
        self._issued = None if is_blocking or not isinstance(device, StreamDevice) else device
        self._order: LaneClocks[list[object]] = LaneClocks()
        self._last: dict[Lane, Ordered] = {}  # of each lane, if lanes are streams
        self._lanes: dict[Lane, TaskLane] = {}
        self._task = _named  # wraps each task before its lane gets it
        give_up = partial(_give_up, self._lanes, self.exiting, os.getpid())
        atexit.register(give_up)
        weakref.finalize(self, _close, self._lanes, give_up).atexit = False

    @staticmethod
    def shared(topology: Topology, device: Device, *, is_blocking: bool) -> Lanes:
        """The lanes for the groups of a topology; they live as long as the topology.

        All models share them, because the collectives of a group must start in one order: also if models
        take turns, or if a model follows another whose failed step left tasks behind.
        """
        lanes = _shared.setdefault(topology, {})
        if device.torch not in lanes:
            lanes[device.torch] = Lanes(device, is_blocking=is_blocking)
        return lanes[device.torch]

    def scratch(self) -> Scratch:
        """Memory for the task that is started next."""
        return Scratch(self._issued)

    def start(
        self,
        lane: Lane,
        run: Run,
        *,
        out: Tensor,
        reads: Sequence[Tensor | Pending],
        name: str,
        scratch: Scratch | None = None,
    ) -> Pending:
        """Run `run`, which reads `reads` and fills `out`, on a lane.  scratch: what `run` takes memory from.

        The caller must allocate `out`: memory belongs to the compute stream, and a lane touches it only
        after the work that the compute stream got before.
        """
        after = [r.done for r in reads if isinstance(r, Pending) and r.done is not None]
        held: list[object] = [out, *reads, scratch]
        task = self._task(lane, name, run)
        if not isinstance(self.device, StreamDevice):
            return Pending(out, done=self._lane(lane).start(task, after, held))
        # Before the start: a task that fails may leave unfinished work on its stream.
        clocks = [done.clock for done in after if isinstance(done, Ordered)]
        clock = self._order.add(lane, clocks, held)
        task = within(partial(self.device.watching, name), task)
        done = Ordered(self._lane(lane).start(task, after, held), clock, self._order)
        self._last[lane] = done
        return Pending(out, done=done)

    def settle(self) -> None:
        """Order compute after all started tasks, because the step that would have waited for them failed.

        Later code may write to memory that lanes still read, such as home shards.  Does nothing if it would
        block.
        """
        if self._issued is not None:
            for done in self._last.values():
                done.order()
                done.passed()

    @contextmanager
    def timing(self, timed: Timed) -> Iterator[None]:
        """Wrap the tasks that are started within it by `timed`."""
        self._task = lambda lane, name, run: timed(lane, _named(lane, name, run))
        try:
            yield
        finally:
            self._task = _named

    def _lane(self, lane: Lane) -> TaskLane:
        if lane not in self._lanes:
            is_urgent = lane in _URGENT
            self._lanes[lane] = (
                ThreadLane(f"fcdp {lane.value}", self.device, self.exiting, is_urgent=is_urgent)
                if self._issued is None
                else StreamLane(self._issued, is_urgent=is_urgent)
            )
        return self._lanes[lane]


_shared: weakref.WeakKeyDictionary[Topology, dict[torch.device, Lanes]] = (
    weakref.WeakKeyDictionary()
)


def _close(lanes: dict[Lane, TaskLane], give_up: Callable[[], None]) -> None:
    atexit.unregister(give_up)
    for lane in lanes.values():
        lane.close()


def _give_up(lanes: dict[Lane, TaskLane], exiting: Event, pid: int) -> None:
    if os.getpid() != pid:  # a forked child has none of the threads
        return
    exiting.set()
    for lane in lanes.values():
        lane.close()
    for lane in lanes.values():
        lane.join()


def _named(lane: Lane, name: str, run: Run) -> Run:
    return within(partial(record_function, name), run) if is_profiling() else run
