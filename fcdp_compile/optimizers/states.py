"""The states of optimizers that wait on the host: which kinds, in which buckets, on whose memory.

    host     [exp_avg of p0 | exp_avg_sq of p0 | exp_avg of p1 | …]   one slab, bytes
                 │ load (one copy)                      ▲ store (one copy)
    device   the same bytes while the optimizer steps p0, p1, …

The tensors in the optimizer's `state` stay the same objects: only their memory moves."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp_compile.core.params.home_shard import HomeShard
from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.ranks.messages import together
from fcdp_compile.errors import ArgumentError, FcdpError
from fcdp_compile.plan import Kind
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.counters import LOAD_STATES, STORE_STATES, Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.torch_compat.tensors import copy_all

StateKinds = Mapping[str, torch.dtype]
"""The states of a parameter that have its shape: each state's name and dtype."""

_SIDE = 64
"""Sides of the small tensor; libraries quantise the states of tensors of 4096 elements and more."""


def unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The `step` of an optimizer's class as a function of the optimizer, without torch's hooks."""
    step: Any = type(optimizer).step
    found: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found


def kinds_of_states(
    optimizer: Optimizer,
    parameters: Iterable[tuple[Tensor, dict[str, Any]]],
    device: torch.device,
) -> list[StateKinds]:
    """The states that an optimizer keeps of each of these parameters; it tries a step for each kind.

    parameters: with their groups.  device: where the optimizer steps.

    Raises: ArgumentError if the optimizer cannot step some of its parameters at a time, or if its states are
    no plain tensors.
    """
    found: dict[Any, StateKinds] = {}
    kinds = []
    for p, group in parameters:
        key = id(group), p.dim(), p.dtype
        if key not in found:  # states of a scalar are a few bytes
            found[key] = _tried(optimizer, p, group, device) if p.dim() else {}
        kinds.append(found[key])
    return kinds


def _tried(
    optimizer: Optimizer, parameter: Tensor, group: dict[str, Any], device: torch.device
) -> StateKinds:
    name = type(optimizer).__name__
    probe: Any = object.__new__(type(optimizer))
    probe.__dict__.update(vars(optimizer))
    shape = (1,) * (parameter.dim() - 2) + ((_SIDE, _SIDE) if parameter.dim() > 1 else (_SIDE**2,))
    small = torch.zeros(shape, dtype=parameter.dtype, device=device)
    small.requires_grad_()
    small.grad = torch.zeros_like(small)
    alone = {**group, "params": [small]}
    probe.param_groups = [alone]
    probe.state = type(optimizer.state)(dict)
    before = _public(probe), {**alone}
    try:
        unhooked_step(probe)(probe)
    except Exception as error:  # an optimizer of any library may raise anything here
        raise ArgumentError(
            f"{name} cannot be offloaded: stepping one parameter without a closure raises "
            f"{type(error).__name__} ({error}); step the model with it as it is"
        ) from error
    after = _public(probe), {**alone}
    if [*probe.state] not in ([], [small]) or any(
        b.keys() != a.keys() or any(b[k] is not a[k] for k in b)
        for b, a in zip(before, after, strict=True)
    ):
        raise ArgumentError(
            f"{name} cannot be offloaded: its step changes more than its parameters and their states, "
            "and offload steps some parameters at a time; step the model with it as it is"
        )
    states = probe.state.get(small, {})
    alike = {k: v for k, v in states.items() if is_like(v, small)}
    if strange := next((type(v).__name__ for v in alike.values() if type(v) is not Tensor), ""):
        raise ArgumentError(
            f"{name} cannot be offloaded: its states are of class {strange}, and offload moves plain "
            "tensors; step the model with it as it is"
        )
    return {k: v.dtype for k, v in alike.items()}


def is_like(state: object, parameter: Tensor) -> bool:
    """Whether a state has the shape of its parameter; that of a scalar cannot tell."""
    return isinstance(state, Tensor) and parameter.dim() > 0 and state.shape == parameter.shape


def _public(optimizer: Optimizer) -> dict[str, Any]:
    ours = ("state", "param_groups")
    found = vars(optimizer).items()
    return {k: v for k, v in found if not k.startswith("_") and k not in ours}


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


Copies = Sequence[tuple[Tensor, Tensor]]
"""Targets and sources."""


class _Existing(NamedTuple):
    """A state that exists; held: this rank's part as it is now."""

    parameter: Tensor
    key: str
    tensor: Tensor
    held: Tensor
    place: StatePlace
    at_home: Tensor


@dataclass(frozen=True, slots=True)
class Bus:
    """Copies states of one model between the device and the host, and counts their bytes."""

    lanes: Lanes
    counters: Counters

    def start(self, kind: Kind, number: int, copies: Copies) -> Pending | None:
        """Start to copy states of the bucket with this number; the first target is the result."""
        if not copies:
            return None
        what = LOAD_STATES if kind is Kind.LOAD else STORE_STATES
        self.counters.add(what, sum(source.nbytes for _, source in copies))
        run = partial(copy_all, *zip(*copies, strict=True))
        # All tensors of both sides are held until the copies are done.
        out, *held = [tensor for pair in copies for tensor in pair]
        return self.lanes.start(kind.lane, run, out=out, reads=held, name=f"fcdp::{what} {number}")


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
        return HomeTensor.on_home(there, value._spec)

    def load(self, states: States, bus: Bus) -> Pending | None:
        """Start to copy the states to the device; None if there are none yet."""
        if self._slab is None or not self.absorb(states):
            return None
        slab = self._slab
        with torch.inference_mode(False):
            memory = torch.empty_like(slab, device=bus.lanes.device.torch)
        return bus.start(Kind.LOAD, self.number, [(memory, slab)])

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

    def store(self, left: Sequence[_Existing], memory: Tensor | None, bus: Bus) -> Pending | None:
        """Start to copy what `leave` returned to the host.

        memory: of the states on the device; states that the step has made are elsewhere.
        """
        if self._slab is None or not left:
            return None
        pairs = [(s.at_home, s.held) for s in left]
        if memory is not None and all(_is(s.held, s.place.within(memory)) for s in left):
            pairs = [(self._slab, memory)]
        return bus.start(Kind.STORE, self.number, pairs)

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


class StateMemory:
    """The memory of one optimizer's states.

    what: names the states, for errors.  folder: of the files; None: in host memory.
    """

    def __init__(self, what: str, model: ShardedModel, folder: Path | None) -> None:
        self._what = what
        self._folder = folder
        self._pool: PinnedPool = model.pool
        self._host: HostMemory = model.host_memory
        self._slabs: list[Tensor] = []
        self._booked_bytes = 0

    def take(self, buckets: Sequence[StateBucket], model: ShardedModel) -> None:
        """Give each bucket its memory; all ranks of the model must call it.

        Raises: FcdpError on every rank if any rank has no room; nothing is taken then.
        """
        size = sum(-(-b.size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE for b in buckets)
        booked = 0
        if self._folder is None:
            booked = self._host.book(
                self._what, size, model.collectives, self._pool, is_pinned=model.device.registers
            )
        made: list[Tensor] = []  # also by a rank that fails
        try:
            doing = f"the memory for {self._what}"
            together(
                model.topology.control, lambda: made.extend(map(self._slab, buckets)), doing=doing
            )
        except FcdpError:
            self._host.unplanned_bytes -= booked
            self._release(made)
            raise
        self._booked_bytes += booked
        self._slabs += made
        for bucket, slab in zip(buckets, made, strict=True):
            bucket.put_on(slab)

    def end(self) -> None:
        """Give the memory back, because the optimizer is gone."""
        self._release(self._slabs)
        self._slabs = []
        self._host.freed_bytes += self._booked_bytes

    def _slab(self, bucket: StateBucket) -> Tensor:
        if not bucket.size_bytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        if self._folder is None:
            return self._pool.take(bucket.size_bytes, torch.uint8)
        try:
            return _mapped(self._folder, bucket.size_bytes)
        except (OSError, ValueError) as error:  # ValueError: no system takes such a name
            raise FcdpError(
                f"cannot reserve {bucket.size_bytes} bytes for {self._what} in folder {str(self._folder)!r} "
                f"({getattr(error, 'strerror', error)}); choose a folder that exists, can be written to and "
                "has room"
            ) from error

    def _release(self, slabs: Sequence[Tensor]) -> None:
        for slab in slabs if self._folder is None else ():  # a file is gone with its last tensor
            if slab.numel():
                self._pool.give_back(slab)


def _mapped(folder: Path, size_bytes: int) -> Tensor:
    """A tensor of bytes in a new file without a name, whose space is reserved.

    Raises: OSError.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
        mapping = mmap.mmap(file.fileno(), size_bytes)
    mapping.madvise(mmap.MADV_SEQUENTIAL)
    with torch.inference_mode(False):
        return torch.frombuffer(mapping, dtype=torch.uint8)
