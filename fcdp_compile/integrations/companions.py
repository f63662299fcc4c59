"""Models that are only evaluated, such as a reference or a teacher: frozen when they are sharded."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fcdp_compile.core.params.home_shard import REPLACED
from fcdp_compile.errors import ArgumentError

_trained_before: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
"""The names of the parameters that were trained in models that an Accelerator has frozen."""


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Freeze a model that is sharded within the block; another model may share its parameters until then."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    model.requires_grad_(False)
    try:
        yield
        _trained_before[model] = list(trained)
    finally:
        for parameter in trained.values():
            parameter.requires_grad_(True)


def unfreeze(model: nn.Module) -> None:
    """Take back what `frozen` has done, because the model is trained after all."""
    for name in _trained_before.pop(model, ()):
        model.get_parameter(name).requires_grad_(True)


def refuse_shared_parameters(model: nn.Module) -> None:
    """Refuse parameters that are trained and shared with a sharded model, which would not see the steps.

    Raises: ArgumentError.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (other := getattr(parameter, REPLACED, None)) is not None:
            raise ArgumentError(
                f"parameter {name!r} is trained, and is also {other!r} of a model that has been sharded, "
                "such as a reference; sharded models share no parameters: give the other model a copy, "
                "or freeze the parameter"
            )
