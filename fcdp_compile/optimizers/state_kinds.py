"""Which states an optimizer keeps for a parameter, found by a step of a copy of it on a small tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fcdp_compile.errors import ArgumentError

StateKinds = Mapping[str, torch.dtype]
"""The states of a parameter that have its shape: each state's name and dtype."""

_SIDE = 64
"""Sides of the small tensor; libraries quantise the states of tensors of 4096 elements and more."""


def unhooked_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The `step` of an optimizer's class as a function of the optimizer, without torch's hooks."""
    step: Any = type(optimizer).step
    found: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return found


class KindsOfStates:
    """The states that one optimizer keeps, found once for each kind of parameter.

    device: where it steps.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._device = device
        self._found: dict[Any, StateKinds] = {}

    def of(self, parameter: Tensor, group: dict[str, Any]) -> StateKinds:
        """The states of a parameter of this group.

        Raises: ArgumentError if the optimizer cannot step some of its parameters at a time, or if its states
        are no plain tensors.
        """
        if not parameter.dim():
            return {}  # a few bytes
        key = id(group), parameter.dim(), parameter.dtype
        if key not in self._found:
            self._found[key] = self._tried(parameter, group)
        return self._found[key]

    def _tried(self, parameter: Tensor, group: dict[str, Any]) -> StateKinds:
        name = type(self._optimizer).__name__
        probe: Any = object.__new__(type(self._optimizer))
        probe.__dict__.update(vars(self._optimizer))
        shape = (1,) * (parameter.dim() - 2) + (
            (_SIDE, _SIDE) if parameter.dim() > 1 else (_SIDE**2,)
        )
        small = torch.zeros(shape, dtype=parameter.dtype, device=self._device)
        small.requires_grad_()
        small.grad = torch.zeros_like(small)
        alone = {**group, "params": [small]}
        probe.param_groups = [alone]
        probe.state = type(self._optimizer.state)(dict)
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
