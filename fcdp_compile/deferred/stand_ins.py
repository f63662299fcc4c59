"""Stand-ins for the tensors of a model while its own initialisation runs, module by module.

Every parameter and buffer of the model has a slot.  At rest the slot holds a fake tensor, which has no
memory.  First every initialisation runs on the fake tensors alone and a dispatch mode notes what it touches.
Then it runs once more, on real whole tensors in the slots that it touches and nowhere else; what it leaves in
the slot of a parameter that awaits values goes to the home shard, this rank's rows of it, and the tensor is
freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.deferred.initialisation import Step
from fcdp_compile.devices import device_of
from fcdp_compile.errors import FcdpError
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.torch_compat import DispatchMode, FakeTensorMode, storage_id, without_modes

_OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "bernoulli_")
"""In-place ops of aten that do not read what they write to."""


@dataclass(eq=False, slots=True, kw_only=True)
class Slot:
    """A place of the model for a tensor: a parameter's or a buffer's.

    original: what is there.  record: of a sharded parameter.  full_name: the parameter's or buffer's, also in
    other places of a tied one.  is_awaited: whether it is without values.  gives: whether it then gets them
    from this slot; what is written to the other places of a tied one is dropped.
    """

    module: nn.Module
    name: str
    original: Tensor
    record: ParamRecord | None
    is_buffer: bool
    full_name: str
    is_awaited: bool
    gives: bool
    resting: Tensor | None = None

    @property
    def held(self) -> dict[str, Any]:
        """The module's dictionary that the slot is in."""
        return self.module._buffers if self.is_buffer else self.module._parameters

    def fake(self, mode: FakeTensorMode, device: torch.device) -> Tensor:
        """A stand-in without memory, made in a fake mode."""
        with mode:
            return self.wrap(
                torch.empty(self.original.shape, dtype=self.original.dtype, device=device)
            )

    def wrap(self, values: Tensor) -> Tensor:
        """Whole values as what the slot holds: a parameter if it is one's, with the marks it has."""
        if self.is_buffer:
            return values
        made = nn.Parameter(values, requires_grad=self.original.requires_grad)
        for name, value in vars(self.original).items():
            # This mark says that there is nothing left to initialise.
            if not name.startswith("_fcdp") and name not in _NOT_KEPT:
                setattr(made, name, value)
        return made

    def unset(self, device: torch.device) -> Tensor:
        """Whole memory in which `has_unset` sees what nobody writes to."""
        made = torch.empty(self.original.shape, dtype=self.original.dtype, device=device)
        if (mark := _unset_mark(made.dtype)) is not None:
            made.fill_(mark)
        return made


_NOT_KEPT = ("_is_hf_initialized", "_spec", "_local_tensor", "_calls", "_away", "_is_param", "seal")


def _unset_mark(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    is_signed = dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
    return torch.iinfo(dtype).min if is_signed else None


def has_unset(tensor: Tensor) -> bool:
    """Whether something of `Slot.unset` was not written to: not a number, or the least of integers."""
    mark = _unset_mark(tensor.dtype)
    if mark is None:
        return False  # every value of a byte may be meant
    if isinstance(mark, int):
        return bool((tensor == mark).any())
    few_bits = tensor.is_floating_point() and tensor.itemsize == 1  # kernels lack comparisons
    return bool(torch.isnan(tensor.float() if few_bits else tensor).any())


@dataclass(slots=True)
class Touch:
    """What an initialisation does to a slot: whether it needs its values first, and whether it writes."""

    needs_values: bool
    writes: bool = False


@dataclass(slots=True, kw_only=True)
class Touched:
    """An initialisation and the slots that it touches."""

    step: Step
    slots: dict[Slot, Touch] = field(default_factory=dict)


@contextmanager
def standing_in(slots: Sequence[Slot], device: torch.device) -> Iterator[FakeTensorMode]:
    """Put fake tensors in all slots; afterwards there is again what was."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    modules = list(dict.fromkeys(slot.module for slot in slots))
    kept = [(m, dict(m._parameters), dict(m._buffers)) for m in modules]
    try:
        for slot in slots:
            slot.resting = slot.fake(mode, device)
            slot.held[slot.name] = slot.resting
        yield mode
    finally:
        for module, parameters, buffers in kept:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
        for slot in slots:
            slot.resting = None


def rehearse(
    steps: Sequence[Step], slots: Sequence[Slot], mode: FakeTensorMode, device: torch.device
) -> list[Touched]:
    """Run every initialisation on fake tensors; those that write to a slot that awaits values.

    No random number generator is moved.
    """
    by_module: dict[nn.Module, list[Slot]] = {}
    for slot in slots:
        by_module.setdefault(slot.module, []).append(slot)
    by_storage = {storage_id(_resting(slot)): slot for slot in slots}
    found = []
    with generators_kept(device):
        for step in steps:
            touched = Touched(step=step)
            watch = _Watch(by_storage)
            try:
                with torch.no_grad(), device, mode, watch:
                    step.act()
            except Exception:
                # It looks at values, say, which fake tensors have not: taken to touch all below its module.
                # What else it touches is seen when it runs (`Strays`).
                touched.slots = {
                    slot: Touch(needs_values=True, writes=True)
                    for module in step.module.modules()
                    for slot in by_module.get(module, ())
                }
            else:
                touched.slots = watch.touches
            for slot in (s for m in step.module.modules() for s in by_module.get(m, ())):
                is_other = slot.held.get(slot.name) is not slot.resting
                if is_other or by_storage.get(storage_id(_resting(slot))) is not slot:
                    # Another tensor was put there, or other memory into it (`.data = ...`).
                    touched.slots.setdefault(slot, Touch(needs_values=False)).writes = True
                    by_storage = {i: s for i, s in by_storage.items() if s is not slot}
                    slot.resting = slot.held[slot.name] = slot.fake(mode, device)
                    by_storage[storage_id(slot.resting)] = slot
            if any(t.writes and slot.is_awaited for slot, t in touched.slots.items()):
                found.append(touched)
    return found


def _resting(slot: Slot) -> Tensor:
    assert slot.resting is not None, "slots hold stand-ins while initialisations are rehearsed"
    return slot.resting


class Strays:
    """Finds the stand-ins that an initialisation touches though it did not when it was rehearsed."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._by_storage = {storage_id(_resting(slot)): slot for slot in slots}

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Raise FcdpError at the end if any was touched: what was written to it is lost."""
        with _Watch(self._by_storage) as watch:
            yield
        if stray := next(iter(watch.touches), None):
            raise FcdpError(
                f"it uses {stray.full_name} of another module, which could not be foreseen; let "
                "each module set its own, or give them values by load_pretrained or load_state_dict"
            )


class _Watch(DispatchMode):
    """Notes which slots the ops read and write, known by the memory that they would have."""

    def __init__(self, slots: dict[int, Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the mode has no types
        self._slots = slots
        self.touches: dict[Slot, Touch] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = []
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            for tensor in value if isinstance(value, list | tuple) else (value,):
                slot = self._slots.get(storage_id(tensor)) if isinstance(tensor, Tensor) else None
                if slot is None:
                    continue
                if alias is None:
                    self.touches.setdefault(slot, Touch(needs_values=True))
                elif alias.is_write:
                    written.append((slot, tensor, argument.is_out))
                # else a view, which reads nothing
        for slot, tensor, is_out in written:
            whole = tensor.numel() == slot.original.numel()
            replaces = whole and (is_out or func._schema.name.rpartition("::")[2] in _OVERWRITING)
            self.touches.setdefault(slot, Touch(needs_values=not replaces)).writes = True
        return func(*args, **kwargs)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leave torch's random number generators as they were."""
    states = generator_states(device)
    try:
        yield
    finally:
        set_generators(states, device)


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that an initialisation on a device draws from."""
    with without_modes():
        states = [torch.get_rng_state()]
        if (of_card := device_of(device).rng_state()) is not None:
            states.append(of_card)
    return states


def set_generators(states: Sequence[Tensor], device: torch.device) -> None:
    """Set what `generator_states` gave."""
    with without_modes():
        torch.set_rng_state(states[0])
        for of_card in states[1:]:
            device_of(device).set_rng_state(of_card)
