"""Let a backward program end before its reductions do: they run while the next program computes.

[Note: drains] A backward program ends with steps that only wait for its last reductions: its drain.  The
program returns without them, and its gradients are `LateTensor`s.  The drain runs when the drain of the next
program begins, when the backward ends, or when anything reads one of the gradients, whichever comes first.
So at most one program's reductions are on their way beside another program, and after a backward the `.grad`
of every parameter has its values.

A drain runs on the stream of its program, whoever reads, because memory belongs to that stream
(`plan.lane_clocks`); the reader's stream waits for it.  The first run of a program is not cut short, because
only its results show what memory layout a late gradient will have, which Dynamo compares.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from threading import Lock

from torch import Tensor

from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.late import Awaited, LateTensor
from fcdp_compile.devices import Device, Event, StreamDevice
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.torch_compat.autograd import at_end_of_backward, backward_number, without_modes
from fcdp_compile.torch_compat.tensors import MemoryLayout


class Drains:
    """The drains of one model that have not run yet."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Of backwards that are under way; autograd holds each until it ends or fails.
        self._under_way: weakref.WeakValueDictionary[int, _BackwardDrains] = (
            weakref.WeakValueDictionary()
        )

    def begin(
        self,
        run: Callable[[], Sequence[Tensor]],
        layouts: Sequence[MemoryLayout],
        trained: Sequence[ParamRecord],
    ) -> list[Tensor]:
        """Run the last drain of this backward if it has not run; the results of `run`, which runs later.

        layouts: of the results.  trained: the parameters whose gradients they are.
        """
        number = backward_number()
        if (backward := self._under_way.get(number)) is None:
            backward = self._under_way[number] = _BackwardDrains()
            at_end_of_backward(backward.end)
        drain = _Drain(run, self._device)
        results: list[Tensor] = [LateTensor(layout, drain.result()) for layout in layouts]
        backward.begin(drain, trained)
        return results


class _BackwardDrains:
    """One backward that is under way."""

    def __init__(self) -> None:
        self._last: _Drain | None = None
        self._trained: list[Sequence[ParamRecord]] = []

    def begin(self, drain: _Drain, trained: Sequence[ParamRecord]) -> None:
        last, self._last = self._last, drain
        self._trained.append(trained)
        if last is not None:
            last.finish()

    def end(self) -> None:
        """Run the last drain if it has not run, and replace late tensors in gradients by their values."""
        if self._last is not None:
            self._last.finish()
        for record in chain.from_iterable(self._trained):
            for parameter in record.places():
                if isinstance(grad := parameter.grad, HomeTensor):
                    grad.settle()


class _Drain:
    """The end of one program."""

    def __init__(self, run: Callable[[], Sequence[Tensor]], device: Device) -> None:
        self._run: Callable[[], Sequence[Tensor]] | None = run
        self._error: BaseException | None = None
        self._lock = Lock()
        self._results: list[weakref.ref[Awaited]] = []
        self._device = device if isinstance(device, StreamDevice) else None
        self._stream = None if self._device is None else self._device.current_stream()
        self._ended: Event | None = None

    def result(self) -> Awaited:
        """The next result."""
        result = Awaited(self.finish)
        self._results.append(weakref.ref(result))
        return result

    def finish(self) -> None:
        """Run it if it has not run; any thread may call it.

        Raises: whatever the run raised, every time.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._run is not None:
                run, self._run = self._run, None
                try:
                    self._finish(run)
                except BaseException as error:
                    self._error = error
                    raise
        if self._device is not None and (now := self._device.current_stream()) != self._stream:
            now.wait_event(self._ended)

    def _finish(self, run: Callable[[], Sequence[Tensor]]) -> None:
        device, stream = self._device, self._stream
        on_stream = nullcontext() if device is None or stream is None else device.on(stream)
        with without_modes(), on_stream:
            values = run()
            self._ended = None if device is None else device.record()
        for ref, value in zip(self._results, values, strict=True):
            if (result := ref()) is not None:
                result.value = value
        self._results.clear()
