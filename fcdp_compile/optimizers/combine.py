"""Several optimizers as one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fcdp_compile.errors import ArgumentError


def combine(*optimizers: Optimizer) -> Optimizer:
    """Make one optimizer that steps several, for a Trainer, a scheduler or `fcdp_compile.save`.

    It has the parameter groups and the states of all, in order.

    Raises: ValueError for no optimizers, or if two of them have the same parameter; TypeError for anything
    but optimizers.
    """
    if not optimizers:
        raise ArgumentError("combine needs at least one optimizer; give those that step the model")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"combine takes torch optimizers, not {type(optimizer).__name__}; give it built optimizers"
            )
        if isinstance(optimizer, LBFGS):
            raise ArgumentError(
                "LBFGS computes the loss several times in a step, which only it may do; step it alone"
            )
    owners: dict[Tensor, Optimizer] = {}
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if owners.setdefault(p, optimizer) is not optimizer:
                raise ArgumentError(
                    f"{type(owners[p]).__name__} and {type(optimizer).__name__} both have a parameter of "
                    f"shape {tuple(p.shape)}; give each parameter to only one optimizer"
                )
    return Combined(optimizers)


class Combined(Optimizer):
    """See `combine`.

    Its groups and states are those of its optimizers.
    """

    _is_made = False

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        common = {k: v for k, v in optimizers[0].defaults.items() if _is_in_all(k, optimizers)}
        super().__init__([p for group in self.param_groups for p in group["params"]], common)
        self._is_made = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups that the optimizers have now."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Torch sets an empty list when it builds an optimizer; afterwards each optimizer gets its own."""
        rest = iter(groups)
        for optimizer in self.optimizers if groups else ():
            own = [next(rest) for _ in optimizer.param_groups]
            optimizer.__setstate__({"param_groups": own})

    @property  # type: ignore[override]
    def state(self) -> _States:
        """The states of all parameters, each kept by the optimizer that steps the parameter."""
        self.settle()
        return _States(self.optimizers)

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        if self._is_made:  # torch sets an empty one when it builds an optimizer
            self.state.replace(states)

    def settle(self) -> None:
        """Let the states be complete, before something reads them."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step each optimizer."""
        loss = loss_of(closure)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: ArgumentError once the optimizers are combined."""
        if self._is_made:
            raise ArgumentError(
                "a combined optimizer cannot know which of its optimizers gets a new parameter group; add "
                "the group to that optimizer"
            )

    def __getstate__(self) -> dict[str, Any]:
        kept = ("optimizers", "defaults", "_is_made")
        return {name: vars(self)[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        states = state.pop("state", None)
        groups = state.pop("param_groups", ())
        super().__setstate__(state)
        self.param_groups = groups
        if states is not None:
            self.state.replace(states)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss that a step's closure computes, with its gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _is_in_all(name: str, optimizers: Sequence[Optimizer]) -> bool:
    return all(name in optimizer.defaults for optimizer in optimizers)


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers as one mapping."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _owner(self, key: Any) -> Optimizer:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if any(p is key for p in group["params"]):
                    return optimizer
        return self._optimizers[0]  # torch keeps a state of none of the parameters, too

    def __getitem__(self, key: Any) -> Any:
        return self._owner(key).state[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """As of an optimizer's own states: looking makes no state."""
        return self._owner(key).state.get(key, default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._owner(key).state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._owner(key).state[key]

    def __contains__(self, key: object) -> bool:
        return any(key in o.state for o in self._optimizers)

    def __iter__(self) -> Iterator[Any]:
        return (key for o in self._optimizers for key in o.state)

    def __len__(self) -> int:
        return sum(len(o.state) for o in self._optimizers)

    def replace(self, states: Mapping[Any, Any]) -> None:
        """Put these states in the place of all states."""
        given = dict(states)
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for key, value in given.items():
            self[key] = value
