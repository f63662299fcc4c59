"""Step parameters in host memory, on copies of them, by torch's kernels for the CPU.

    store     gradients 0 │ gradients 1 │ gradients 2 │
    CPU                   │ step 0      │ step 1      │ step 2     │
    load                                │ parameters 0│ parameters 1 …

States never leave the host.  The copies of parameters stay there, too; before a step, fingerprints tell which
parameters were written to since, and only these are copied again.
Source: ZeRO-Offload (Ren et al., 2021), section 4.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, Optimizer

from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.seals.fingerprint import fingerprints
from fcdp_compile.devices import Device
from fcdp_compile.optimizers.device_steps import stepping
from fcdp_compile.optimizers.states import StateBucket, StateKinds, held_by, part_of, unhooked_step
from fcdp_compile.plan import Kind
from fcdp_compile.runtime.buckets.validity import read
from fcdp_compile.runtime.collectives.counters import LOAD_STATES, STORE_STATES, Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.torch_compat import copy_all

_PARAMETER, _GRADIENT = "fcdp::parameter", "fcdp::gradient"
"""The names of the places of a bucket that are no states; no optimizer has such names."""

_FUSED = (Adagrad, Adam, SGD)
"""Optimizers with fused kernels for the CPU; AdamW is a subclass of Adam."""

_Copies = list[tuple[Tensor, Tensor]]
"""Targets and sources."""


class HostSteps:
    """Steps of one optimizer on the host; see above.

    steps_at: the device of the parameters that the optimizer steps.  told: names the way, for errors.
    """

    told = "the host, which steps them"

    def __init__(self, device: Device, lanes: Lanes, counters: Counters) -> None:
        self.steps_at = torch.device("cpu")
        self._device = device
        self._lanes = lanes
        self._counters = counters
        # By the bucket's number: fingerprints of the parameters that the copies are equal to.
        self._marks: dict[int, Tensor] = {}

    def kept(self, kinds: StateKinds, parameter: Tensor) -> StateKinds:
        """What waits on the host for a parameter with these states."""
        if not parameter.dim():
            return {_PARAMETER: parameter.dtype, _GRADIENT: parameter.dtype}
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
        copies: _Copies = []
        for i, p in enumerate(bucket.parameters):
            places = bucket.views[i]
            if _GRADIENT in places and p.grad is not None:
                copies.append((places[_GRADIENT], _present(p.grad)))
            if _PARAMETER in places and with_parameters:
                copies.append((places[_PARAMETER], _present(p)))
        return self._start(STORE_STATES, Kind.STORE, bucket, copies)

    def _send(self, bucket: StateBucket) -> Pending | None:
        """Start to copy stepped parameters to the device."""
        copies = [
            (_present(p), bucket.views[i][_PARAMETER])
            for i, p in enumerate(bucket.parameters)
            if _PARAMETER in bucket.views[i] and p.grad is not None
        ]
        return self._start(LOAD_STATES, Kind.LOAD, bucket, copies)

    def _start(self, what: str, kind: Kind, bucket: StateBucket, copies: _Copies) -> Pending | None:
        if not copies:
            return None
        self._counters.add(what, sum(source.nbytes for _, source in copies))

        run = partial(copy_all, *zip(*copies, strict=True))
        # All tensors of both sides are held until the copies are done.
        held = [tensor for pair in copies for tensor in pair]
        name = f"fcdp::{what} {bucket.number}"
        return self._lanes.start(kind.lane, run, out=held[0], reads=held[1:], name=name)

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
    return held_by(tensor.detach() if not isinstance(tensor, DTensor) else tensor).detach()


def _like(parameter: Tensor, held: Tensor | None) -> Tensor:
    """A tensor on the host that is cut like a parameter.  held: this rank's part; None if it has no rows."""
    if held is None:
        held = torch.empty_like(part_of(parameter), device="cpu").detach()
    if not isinstance(parameter, DTensor):
        return held.detach()
    made: Tensor = HomeTensor.adopt(
        DTensor.__new__(DTensor, held, parameter._spec, requires_grad=False)
    )
    return made


def _bring(states: dict[str, Any]) -> None:
    """Let the states of a parameter be tensors on the host; the memory of large ones is there already."""
    for key, value in states.items():
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            continue
        if isinstance(value, DTensor):
            held = held_by(value).cpu()
            states[key] = HomeTensor.adopt(
                DTensor.__new__(DTensor, held, value._spec, requires_grad=False)
            )
        else:
            states[key] = value.cpu()
