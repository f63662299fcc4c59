"""Step parameters whose states wait on the host: on the device, or on the host.

On the device, to which states come bucket by bucket: at most two buckets are there, and none between steps.

    compute   │ step 0 │ step 1 │ step 2 │
    load      0 │  1      2    │
    store              0      1      2

On the host, on copies of the parameters, by torch's kernels for the CPU.  States and copies stay there.
Before a step, fingerprints tell which parameters were written to since, and only these are copied again.
Source: ZeRO-Offload (Ren et al., 2021), section 4.

    store     gradients 0 │ gradients 1 │ gradients 2 │
    CPU                   │ step 0      │ step 1      │ step 2     │
    load                                │ parameters 0│ parameters 1 …
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.seals import fingerprints
from fcdp_compile.devices import Device
from fcdp_compile.optimizers.states import (
    Bus,
    StateBucket,
    StateKinds,
    held_by,
    part_of,
    unhooked_step,
)
from fcdp_compile.plan import Kind
from fcdp_compile.runtime.lanes.reads import read
from fcdp_compile.runtime.lanes.tasks import Pending


class DeviceSteps:
    """Steps of one optimizer on the device; see above.

    steps_at: the device of the parameters that the optimizer steps.  told: names the way, for errors.
    """

    told = "the host"

    def __init__(self, device: Device, bus: Bus) -> None:
        self.steps_at = device.torch
        self._device = device
        self._bus = bus
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
                coming = bucket.load(optimizer.state, self._bus)
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
            stored = bucket.store(left, memory, self._bus)
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


_PARAMETER, _GRADIENT = "fcdp::parameter", "fcdp::gradient"
"""The names of the places of a bucket that are no states; no optimizer has such names."""

_FUSED = (Adagrad, Adam, SGD)
"""Optimizers with fused kernels for the CPU; AdamW is a subclass of Adam."""


class HostSteps:
    """Steps of one optimizer on the host, as `DeviceSteps` on the device."""

    told = "the host, which steps them"

    def __init__(self, device: Device, bus: Bus) -> None:
        self.steps_at = torch.device("cpu")
        self._device = device
        self._bus = bus
        # By the bucket's number: fingerprints of the parameters that the copies are equal to.
        self._marks: dict[int, Tensor] = {}

    def kept(self, kinds: StateKinds, parameter: Tensor) -> StateKinds:
        """What waits on the host for a parameter with these states."""
        return {**kinds, _PARAMETER: parameter.dtype, _GRADIENT: parameter.dtype}

    def settle(self) -> None:
        """Wait until the states on the host are complete, as they always are."""

    @contextmanager
    def choosing(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the optimizer use fused kernels within the block, where the user has chosen nothing."""
        free = [
            group
            for group in optimizer.param_groups
            if isinstance(optimizer, _FUSED)
            and group.get("foreach", 0) is group.get("fused", 0) is None
            and not group.get("differentiable")
        ]
        for group in free:
            group["fused"] = True
        try:
            yield
        finally:
            for group in free:
                group["fused"] = None

    def step(self, optimizer: Optimizer, buckets: Sequence[StateBucket]) -> None:
        """Step bucket by bucket: meanwhile gradients of later buckets come, and earlier parameters go."""
        outdated = self._outdated(buckets)
        arriving = deque(self._fetch(b, with_parameters=b.number in outdated) for b in buckets)
        leaving: list[Pending | None] = []
        try:
            for bucket in buckets:
                if (pending := arriving.popleft()) is not None:
                    pending.wait()
                    self._device.synchronize()  # the Python thread reads the gradients
                self._step_one(optimizer, bucket)
                leaving.append(self._send(bucket))
        finally:
            for rest in (*arriving, *leaving):
                if rest is not None:
                    rest.wait()
        self._marks |= self._fingerprints(buckets)

    def _outdated(self, buckets: Sequence[StateBucket]) -> set[int]:
        """The numbers of the buckets of which a parameter may differ from its copy; forgets their marks."""
        then = {b.number: self._marks.pop(b.number) for b in buckets if b.number in self._marks}
        outdated = {b.number for b in buckets if b.number not in then}
        if now := self._fingerprints([b for b in buckets if b.number in then]):
            differs = read(torch.stack([mark != then[n] for n, mark in now.items()]))
            outdated |= {n for n, is_other in zip(now, differs, strict=True) if is_other}
        return outdated

    def _fingerprints(self, buckets: Sequence[StateBucket]) -> dict[int, Tensor]:
        parts = {b.number: [_present(p) for p in b.parameters] for b in buckets}
        groups = {n: [t for t in of if t.numel()] for n, of in parts.items()}
        groups = {n: of for n, of in groups.items() if of}
        if not groups:
            return {}
        return dict(zip(groups, fingerprints(list(groups.values())).unbind(), strict=True))

    def _fetch(self, bucket: StateBucket, *, with_parameters: bool) -> Pending | None:
        """Start to copy gradients, and parameters whose copies are outdated, to the host."""
        copies: list[tuple[Tensor, Tensor]] = []
        for i, p in enumerate(bucket.parameters):
            places = bucket.views[i]
            if _GRADIENT in places and p.grad is not None:
                copies.append((places[_GRADIENT], _present(p.grad)))
            if _PARAMETER in places and with_parameters:
                copies.append((places[_PARAMETER], _present(p)))
        return self._bus.start(Kind.STORE, bucket.number, copies)

    def _send(self, bucket: StateBucket) -> Pending | None:
        """Start to copy stepped parameters to the device."""
        copies = [
            (_present(p), bucket.views[i][_PARAMETER])
            for i, p in enumerate(bucket.parameters)
            if _PARAMETER in bucket.views[i] and p.grad is not None
        ]
        return self._bus.start(Kind.LOAD, bucket.number, copies)

    def _step_one(self, optimizer: Optimizer, bucket: StateBucket) -> None:
        """Let the optimizer step the copies of one bucket's parameters."""
        states = optimizer.state
        bucket.absorb(states)
        copies: dict[int, Tensor] = {}
        alone: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        pairs: list[tuple[Tensor, Tensor]] = []
        for i, p in enumerate(bucket.parameters):
            if p.grad is None:
                continue
            places = bucket.views[i]
            copy = _like(p, places.get(_PARAMETER))
            copy.grad = _like(p, places.get(_GRADIENT))
            if p in states:
                alone[copy] = states[p]
                _bring(alone[copy])
            copies[id(p)] = copy
            pairs.append((p, copy))
        try:
            optimizer.state = alone
            with stepping(optimizer, lambda p: copies.get(id(p))):
                unhooked_step(optimizer)(optimizer)
        finally:
            optimizer.state = states
            for p, copy in pairs:
                if found := alone.get(copy):
                    states[p] = found
            bucket.absorb(states)


def _present(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without autograd."""
    return held_by(tensor).detach()


def _like(parameter: Tensor, held: Tensor | None) -> Tensor:
    """A tensor on the host that is cut like a parameter.  held: this rank's part; None if it has no rows."""
    if held is None:
        held = torch.empty_like(part_of(parameter), device="cpu").detach()
    if not isinstance(parameter, DTensor):
        return held.detach()
    return HomeTensor.on_home(held, parameter._spec)


def _bring(states: dict[str, Any]) -> None:
    """Let the states of a parameter be tensors on the host; the memory of large ones is there already."""
    for key, value in states.items():
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            continue
        held = held_by(value).cpu()
        states[key] = HomeTensor.on_home(held, value._spec) if isinstance(value, DTensor) else held
