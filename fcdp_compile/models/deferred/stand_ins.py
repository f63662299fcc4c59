"""Stand-ins for the tensors of a model while its own initialisation runs, module by module.

Every parameter and buffer of the model has a slot.  At rest the slot holds a fake tensor, which has no
memory, accepts any operation, and reports the real device (PEFT checks it, and a tensor on meta would not).
While an initialisation runs, the slots that it needs hold real whole tensors instead, and a watch notes the
slots that operations read and write.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.devices import device_of
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.torch_compat import DispatchMode, FakeTensorMode
from fcdp_compile.torch_compat.autograd import without_modes
from fcdp_compile.torch_compat.tensors import storage_id

_OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "exponential_", "bernoulli_")
"""In-place ops of aten that do not read the tensor that they write to."""


@dataclass(eq=False, slots=True, kw_only=True)
class Slot:
    """A place in the model that holds a parameter or buffer.

    original: the tensor in this place.  record: the record of a sharded parameter.
    full_name: the name of the parameter or buffer, the same in all places of a tied one.  is_unset: whether
    it has no values.  gives: whether an unset parameter or buffer gets its values from this slot; values that
    are written to other places of a tied one are dropped.
    """

    module: nn.Module
    name: str
    original: Tensor
    record: ParamRecord | None
    full_name: str
    is_unset: bool
    gives: bool
    resting: Tensor | None = None

    @property
    def is_buffer(self) -> bool:
        """Whether the place is one for buffers."""
        return self.name in self.module._buffers

    @property
    def held(self) -> dict[str, Any]:
        """The module's dictionary that the slot is in."""
        return self.module._buffers if self.is_buffer else self.module._parameters

    def wrap(self, values: Tensor) -> Tensor:
        """Turn whole values into the slot's kind of tensor: a parameter gets the original's attributes."""
        if self.is_buffer:
            return values
        made = nn.Parameter(values, requires_grad=self.original.requires_grad)
        for name, value in vars(self.original).items():
            # `_is_hf_initialized` would say that there is nothing left to initialise.
            if not name.startswith("_fcdp") and name not in _NOT_KEPT:
                setattr(made, name, value)
        return made

    def blank(self, device: torch.device) -> Tensor:
        """A whole tensor in which `has_unset` can find elements that were not written to."""
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
    """Whether elements of a `Slot.blank` were not written to: they are NaN, or the least integer."""
    mark = _unset_mark(tensor.dtype)
    if mark is None:
        return False  # every value of a byte may be intended
    if isinstance(mark, int):
        return bool((tensor == mark).any())
    few_bits = tensor.is_floating_point() and tensor.itemsize == 1  # kernels lack comparisons
    return bool(torch.isnan(tensor.float() if few_bits else tensor).any())


@dataclass(slots=True)
class Touch:
    """How an initialisation uses a slot: whether it needs the slot's values first, and whether it writes."""

    needs_values: bool
    writes: bool = False


class Resting:
    """The fake tensors of slots at rest; slots: by the ids of the fake tensors' storages."""

    def __init__(self, slots: Sequence[Slot], device: torch.device) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._device = device
        self.slots: dict[int, Slot] = {}
        for slot in slots:
            self._put(slot)

    def renew(self, slot: Slot) -> None:
        """Put a new fake tensor into a slot."""
        self.slots = {i: s for i, s in self.slots.items() if s is not slot}
        self._put(slot)

    def _put(self, slot: Slot) -> None:
        with self._mode:
            fake = torch.empty(slot.original.shape, dtype=slot.original.dtype, device=self._device)
            slot.resting = slot.held[slot.name] = slot.wrap(fake)
        self.slots[storage_id(slot.resting)] = slot


@contextmanager
def standing_in(slots: Sequence[Slot], device: torch.device) -> Iterator[Resting]:
    """Put fake tensors in all slots, and restore the slots afterwards."""
    modules = list(dict.fromkeys(slot.module for slot in slots))
    kept = [(m, dict(m._parameters), dict(m._buffers)) for m in modules]
    try:
        yield Resting(slots, device)
    finally:
        for module, parameters, buffers in kept:
            module._parameters.clear()
            module._parameters.update(parameters)
            module._buffers.clear()
            module._buffers.update(buffers)
        for slot in slots:
            slot.resting = None


class Watch(DispatchMode):
    """Notes the slots that ops read and write; it recognises tensors by their storages' ids."""

    def __init__(self, slots: Mapping[int, Slot]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # the mode has no types
        self._slots = slots
        self.touches: dict[Slot, Touch] = {}

    def slot_of(self, value: object) -> Slot | None:
        """The slot that a tensor, or the base of a view, belongs to."""
        return self._slots.get(storage_id(value)) if isinstance(value, Tensor) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = []
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            alias = argument.alias_info
            for tensor in value if isinstance(value, list | tuple) else (value,):
                slot = self.slot_of(tensor)
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


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of the generators that an initialisation on a device draws from."""
    with without_modes():
        states = [torch.get_rng_state()]
        if (of_card := device_of(device).rng_state()) is not None:
            states.append(of_card)
    return states


def set_generators(states: Sequence[Tensor], device: torch.device) -> None:
    """Set the states that `generator_states` returned."""
    with without_modes():
        torch.set_rng_state(states[0])
        for of_card in states[1:]:
            device_of(device).set_rng_state(of_card)
