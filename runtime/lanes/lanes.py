"""The lanes beside compute, on which transfers and collectives run.

    CPU, or a card with Gloo   a worker thread a lane: collectives block their caller
    a card with NCCL           a stream a lane: nothing blocks the Python thread

A task is started with the pending results that it reads and runs after them, and after whatever its lane was
given before.  All ranks start the same tasks in the same order (their plans are compared), so lanes that
wait for each other cannot wait in a circle.
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

from fcdp_compile.devices import Device
from fcdp_compile.params.mesh import Topology
from fcdp_compile.plan import Bucket, Kind, Lane
from fcdp_compile.runtime.lanes.pending import Pending
from fcdp_compile.runtime.lanes.stream_lane import StreamLane
from fcdp_compile.runtime.lanes.stream_order import Ordered, StreamOrder
from fcdp_compile.runtime.lanes.tasks import Run, TaskLane, within
from fcdp_compile.runtime.lanes.thread_lane import ThreadLane
from fcdp_compile.torch_compat import is_profiling

_URGENT = (Lane.INTER, Lane.INTRA)
"""Collectives must not queue behind kernels that fill the whole card; copies do not compete with those."""

Timed = Callable[[Lane, Run], Run]
"""Makes of what a lane is to run what notes when that begins and ends."""


def tensor_of(value: Tensor | Pending) -> Tensor:
    """The buffer of a value that may still be on its way."""
    return value.tensor if isinstance(value, Pending) else value


def range_name(kind: Kind, bucket: Bucket) -> str:
    """What a profiler shows of a step."""
    return f"fcdp::{kind.value} {bucket.id}"


class Lanes:
    """The lanes of the models of one mesh on this rank.

    device: where they move things to and from.
    is_blocking: whether collectives block their caller, so that each lane needs a thread.
    exiting: set when the interpreter ends ([Note: end of the interpreter] in `thread_lane`).
    """

    def __init__(self, device: Device, *, is_blocking: bool) -> None:
        self.exiting = Event()
        self.device = device
        self._is_blocking = is_blocking or not device.has_streams
        self._order = StreamOrder()
        self._last: dict[Lane, Ordered] = {}  # of each lane, where lanes are streams
        self._lanes: dict[Lane, TaskLane] = {}
        self._task = _named  # what a lane is given to run in the place of a run
        give_up = partial(_give_up, self._lanes, self.exiting, os.getpid())
        atexit.register(give_up)
        weakref.finalize(self, _close, self._lanes, give_up).atexit = False

    @staticmethod
    def shared(topology: Topology, device: Device, *, is_blocking: bool) -> Lanes:
        """The lanes for the groups of a topology, which live as long as that.

        Whoever uses one group must start its collectives in one order: also models that take turns, and one
        that follows another whose step failed and left tasks behind.
        """
        lanes = _shared.setdefault(topology, {})
        if device.torch not in lanes:
            lanes[device.torch] = Lanes(device, is_blocking=is_blocking)
        return lanes[device.torch]

    def start(
        self, lane: Lane, run: Run, *, out: Tensor, reads: Sequence[Tensor | Pending], name: str
    ) -> Pending:
        """Run `run`, which reads `reads` and fills `out`, on a lane.

        `out` must be allocated by the caller: memory belongs to the compute stream, and a lane touches it
        only after what the compute stream was given before.
        """
        after = [r.done for r in reads if isinstance(r, Pending) and r.done is not None]
        held: list[object] = [out, *reads]
        task = self._task(lane, name, run)
        if not self.device.has_streams:
            return Pending(out, done=self._lane(lane).start(task, after, held))
        # First: a task that fails may leave behind on its stream what it had begun.
        clock = self._order.add(lane, after, held)
        task = within(partial(self.device.watching, name), task)
        done = Ordered(self._lane(lane).start(task, after, held), clock, self._order)
        self._last[lane] = done
        return Pending(out, done=done)

    def settle(self) -> None:
        """Let compute come after all that was started, as a step has failed that would have waited for it.

        What lanes still read, such as home shards, may be written to next.  Not where that would block.
        """
        if not self._is_blocking:
            for done in self._last.values():
                done.order()
                done.passed()

    @contextmanager
    def timing(self, timed: Timed) -> Iterator[None]:
        """Run what is started in here as `timed` makes it."""
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
                if self._is_blocking
                else StreamLane(self.device, is_urgent=is_urgent)
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
