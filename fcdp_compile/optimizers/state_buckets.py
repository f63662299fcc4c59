"""The states of some parameters, together on one slab of host memory between steps.

    host     [exp_avg of p0 | exp_avg_sq of p0 | exp_avg of p1 | …]   one slab, bytes
                 │ load (one copy)                      ▲ store (one copy)
    device   the same bytes while the optimizer steps p0, p1, …

The tensors in the optimizer's `state` stay the same objects: only their memory moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fcdp_compile.optimizers.state_kinds import StateKinds, is_like
from fcdp_compile.params.home_shard import HomeShard
from fcdp_compile.params.home_tensor import HomeTensor
from fcdp_compile.plan import Kind
from fcdp_compile.runtime.collectives.counters import LOAD_STATES, STORE_STATES, Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.pending import Pending

_ALIGNMENT = 16
"""Bytes to which a state is rounded up: the widest load of a GPU's thread."""

States = Mapping[Any, dict[str, Any]]
"""The states of an optimizer by parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlace:
    """Where a state of one parameter is within its bucket; shape and stride are those of this rank's part."""

    offset: int
    size_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def within(self, memory: Tensor) -> Tensor:
        """The part of a bucket's memory as the state."""
        flat = memory.narrow(0, self.offset, self.size_bytes).view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class _Existing(NamedTuple):
    """A state that exists; held: this rank's part as it is now."""

    parameter: Tensor
    key: str
    tensor: Tensor
    held: Tensor
    place: StatePlace
    at_home: Tensor


class StateBucket:
    """The states of some parameters of one model.

    kinds: the states of each parameter.  views: their places on the slab.
    States that it has in addition stay where they are.  device: where the optimizer steps.
    """

    def __init__(
        self,
        number: int,
        parameters: Sequence[Tensor],
        kinds: Sequence[StateKinds],
        device: torch.device,
    ) -> None:
        self.number = number
        self._device = device
        self.parameters = list(parameters)
        self._places: list[dict[str, StatePlace]] = []
        self._slab: Tensor | None = None
        self.views: list[dict[str, Tensor]] = []
        offset = 0
        for p, of_one in zip(parameters, kinds, strict=True):
            self._places.append({})
            part = part_of(p)
            stride = torch.empty_like(part, device="meta").stride()  # as that of a new state
            for key, dtype in of_one.items():
                size = part.numel() * dtype.itemsize
                if not size:
                    continue  # other ranks have all rows
                self._places[-1][key] = StatePlace(
                    offset=offset, size_bytes=size, dtype=dtype, shape=part.shape, stride=stride
                )
                offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.size_bytes = offset

    def put_on(self, slab: Tensor) -> None:
        """Give the bucket its memory: a slab of `size_bytes` bytes."""
        self._slab = slab
        self.views = [{k: at.within(slab) for k, at in of.items()} for of in self._places]

    def wants(self, parameter: Tensor, key: str) -> bool:
        """Whether a state of a parameter has a place here."""
        index = next((i for i, p in enumerate(self.parameters) if p is parameter), None)
        return index is not None and key in self._places[index]

    def absorb(self, states: States) -> bool:
        """Move states that are elsewhere, such as loaded ones, to the slab; whether there are any states."""
        found = list(self._existing(states))
        for state in found:
            if not _is(state.held, state.at_home):
                state.at_home.copy_(state.held)
                tensor = self._at_device(state)
                _set(tensor, state.at_home)
                states[state.parameter][state.key] = tensor
        return bool(found)

    def _at_device(self, state: _Existing) -> Tensor:
        """A state that says that it is where the optimizer steps; a DTensor's device never changes."""
        value = state.tensor
        if not isinstance(value, DTensor) or value.device.type == self._device.type:
            return value
        there = torch.empty(state.place.shape, dtype=value.dtype, device=self._device)
        made: Tensor = HomeTensor.adopt(
            DTensor.__new__(DTensor, there, value._spec, requires_grad=False)
        )
        return made

    def load(self, states: States, lanes: Lanes, counters: Counters) -> Pending | None:
        """Start to copy the states to the device; None if there are none yet."""
        if self._slab is None or not self.absorb(states):
            return None
        slab = self._slab
        with torch.inference_mode(False):
            memory = torch.empty_like(slab, device=lanes.device.torch)
        counters.add(LOAD_STATES, slab.nbytes)
        run = partial(memory.copy_, slab, non_blocking=True)
        name = f"fcdp::{LOAD_STATES} {self.number}"
        return lanes.start(Kind.LOAD.lane, run, out=memory, reads=[], name=name)

    def enter(self, states: States, memory: Tensor) -> None:
        """Let the states have their memory on the device."""
        for state in self._existing(states):
            _set(state.tensor, state.place.within(memory))

    def leave(self, states: States) -> list[_Existing]:
        """Let the states have their memory on the host, where the values are stale until they are stored."""
        found = list(self._existing(states))
        for state in found:
            _set(state.tensor, state.at_home)
        return found

    def store(
        self, left: Sequence[_Existing], memory: Tensor | None, lanes: Lanes, counters: Counters
    ) -> Pending | None:
        """Start to copy what `leave` returned to the host.

        memory: of the states on the device; states that the step has made are elsewhere.
        """
        if self._slab is None or not left:
            return None
        pairs = [(s.at_home, s.held) for s in left]
        if memory is not None and all(_is(s.held, s.place.within(memory)) for s in left):
            pairs = [(self._slab, memory)]
        counters.add(STORE_STATES, sum(held.nbytes for _, held in pairs))

        def run() -> None:
            for at_home, held in pairs:
                at_home.copy_(held, non_blocking=True)

        reads = [held for _, held in pairs]
        name = f"fcdp::{STORE_STATES} {self.number}"
        return lanes.start(Kind.STORE.lane, run, out=self._slab, reads=reads, name=name)

    def _existing(self, states: States) -> Iterator[_Existing]:
        for i, p in enumerate(self.parameters):
            for key, value in states.get(p, {}).items():
                place = self._places[i].get(key)
                if place is not None and _fits(value, p, place.dtype):
                    yield _Existing(p, key, value, held_by(value), place, self.views[i][key])


def part_of(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, which may have no memory now."""
    return parameter.held if isinstance(parameter, HomeShard) else parameter


def _fits(value: Any, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Whether a state is cut like its parameter; whole tensors that were loaded are cut before a step."""
    is_cut_alike = isinstance(value, DTensor) == isinstance(parameter, DTensor)
    return is_like(value, parameter) and is_cut_alike and value.dtype == dtype


def held_by(state: Tensor) -> Tensor:
    """This rank's part of a tensor, as a tensor of its own."""
    if isinstance(state, HomeTensor):
        return state.present()
    held: Tensor = state._local_tensor if isinstance(state, DTensor) else state.detach()
    return held


def _set(state: Tensor, held: Tensor) -> None:
    if isinstance(state, DTensor):
        state._local_tensor = held
    else:
        state.data = held


def _is(held: Tensor, view: Tensor) -> bool:
    """Whether a tensor has the memory of a view."""
    return held.device == view.device and held.data_ptr() == view.data_ptr()
