"""Step parameters on the device, with states that come from host memory bucket by bucket.

    compute   │ step 0 │ step 1 │ step 2 │
    load      0 │  1      2    │
    store              0      1      2

At most two buckets of states are on the device, and nothing of them is there outside of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from fcdp_compile.devices import Device
from fcdp_compile.optimizers.states import StateBucket, StateKinds, unhooked_step
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending


class DeviceSteps:
    """Steps of one optimizer on the device; see above.

    steps_at: the device of the parameters that the optimizer steps.  told: names the way, for errors.
    """

    told = "the host"

    def __init__(self, device: Device, lanes: Lanes, counters: Counters) -> None:
        self.steps_at = device.torch
        self._device = device
        self._lanes = lanes
        self._counters = counters
        self._is_stored = True
        self._loading: tuple[StateBucket, Pending | None] | None = None
        self._storing: Pending | None = None

    def kept(self, kinds: StateKinds, parameter: Tensor) -> StateKinds:
        """What waits on the host for a parameter with these states."""
        return kinds

    def settle(self) -> None:
        """Wait until the states on the host are complete."""
        if not self._is_stored:
            self._device.synchronize()  # the reader is the Python thread, not a stream
            self._is_stored = True

    def choosing(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Choose how the optimizer steps within the block."""
        return nullcontext()

    def step(self, optimizer: Optimizer, buckets: Sequence[StateBucket]) -> None:
        """Step bucket by bucket: while one is stepped, the next one is loaded and the one before stored."""
        try:
            for bucket in buckets:
                if self._storing is not None:
                    # Its memory is free before that of this bucket is taken.
                    self._storing.wait()
                    self._storing = None
                coming = bucket.load(optimizer.state, self._lanes, self._counters)
                self._step_loaded(optimizer)
                self._loading = bucket, coming
            self._step_loaded(optimizer)
        finally:
            loading, self._loading = self._loading, None
            for pending in (None if loading is None else loading[1], self._storing):
                if pending is not None:
                    pending.wait()
            self._storing = None

    def _step_loaded(self, optimizer: Optimizer) -> None:
        loading, self._loading = self._loading, None
        if loading is not None:
            bucket, pending = loading
            on_device = None if pending is None else pending.wait()
            del loading, pending
            stored = self._step_one(optimizer, bucket, on_device)
            if stored is not None:
                # Its lane runs in order: who waits for this store waits for those before.
                self._storing = stored

    def _step_one(
        self, optimizer: Optimizer, bucket: StateBucket, memory: Tensor | None
    ) -> Pending | None:
        """Step the parameters of one bucket and start to store its states."""
        mine = {id(p) for p in bucket.parameters}
        if memory is not None:
            bucket.enter(optimizer.state, memory)
        try:
            with stepping(optimizer, lambda p: p if id(p) in mine else None):
                unhooked_step(optimizer)(optimizer)
        finally:
            left = bucket.leave(optimizer.state)
            self._is_stored = False
            stored = bucket.store(left, memory, self._lanes, self._counters)
        return stored


@contextmanager
def stepping(optimizer: Optimizer, replaced: Callable[[Tensor], Tensor | None]) -> Iterator[bool]:
    """Let an optimizer have other parameters within the block; yields whether it has any.

    replaced: the tensor in the place of a parameter, or None.
    """
    groups = optimizer.param_groups
    everything = [group["params"] for group in groups]
    try:
        for group in groups:
            found = [replaced(p) for p in group["params"]]
            group["params"] = [p for p in found if p is not None]
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield bool(optimizer.param_groups)
    finally:
        for group, parameters in zip(groups, everything, strict=True):
            group["params"] = parameters
        optimizer.param_groups = groups
