"""Take a quantised weight apart, whatever library has made it.

A format is a function of a parameter that returns None for a parameter of another format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import ArgumentError
from fcdp_compile.models.quantised.bitsandbytes import bitsandbytes_format
from fcdp_compile.models.quantised.interface import Parts, Recipe, Take
from fcdp_compile.torch_compat import FakeTensor, is_wrapper_subclass


def take_apart(module: nn.Module, name: str) -> Parts | None:
    """The parts of a module's parameter; None if it is a plain tensor.

    The parts share the parameter's memory.

    Raises: ArgumentError for a parameter in a format that fcdp does not know, one that is trainable, and one
    that its library has yet to quantise.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    for format_of in FORMATS:
        if (take := format_of(parameter)) is not None:
            parts = take(module, parameter)
            if parameter.requires_grad:
                raise ArgumentError(
                    "is quantised but trainable, and fcdp cannot average gradients of packed values; call "
                    "requires_grad_(False) on it and train adapters"
                )
            return parts
    if _has_meaning_of_its_own(parameter):
        raise ArgumentError(
            f"is a {type(parameter).__name__}, whose values fcdp cannot take apart; quantise with "
            "bitsandbytes (Linear4bit, Linear8bitLt) or torchao, or dequantise it before shard"
        )
    return None


def _has_meaning_of_its_own(parameter: nn.Parameter) -> bool:
    """Whether a tensor's class gives its values another meaning than a plain tensor's."""
    if type(parameter) in (Tensor, nn.Parameter) or isinstance(parameter, FakeTensor | DTensor):
        return False
    own = type(parameter)
    changes = own.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return changes or not parameter.is_floating_point()


SMALL = 0.01
"""A tensor stays whole if it has less than this part of its weight's bytes: its gathers would cost more."""


class _Class(NamedTuple):
    """A subclass of Tensor that holds others, as `__tensor_flatten__` describes it.

    inner: the names of the tensors that it holds, each with their class, or the dtype of a plain tensor.
    """

    cls: Any
    inner: tuple[tuple[str, _Class | torch.dtype], ...]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Flat(Recipe):
    """A tensor that was taken apart by `__tensor_flatten__`."""

    outer: _Class

    @property
    def meaning(self) -> str:
        return _meaning(self.outer)

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return _joined(self.outer, tensors, "")

    def dequantise(self, weight: Any) -> Tensor:
        values: Tensor = weight.dequantize()
        return values


def _joined(of: _Class, tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    inner = {
        name: tensors[prefix + name]
        if isinstance(within, torch.dtype)
        else _joined(within, tensors, f"{prefix}{name}_")
        for name, within in of.inner
    }
    joined: Tensor = of.cls.__tensor_unflatten__(inner, of.context, of.size, of.stride)
    return joined


def _meaning(of: _Class) -> str:
    """The class, and the dtypes of its tensors and of its context."""
    inner = [
        f"{name} {within if isinstance(within, torch.dtype) else _meaning(within)}"
        for name, within in of.inner
    ]
    context = of.context.values() if isinstance(of.context, Mapping) else of.context
    values = context if isinstance(context, Iterable) else (context,)
    dtypes = [str(value) for value in values if isinstance(value, torch.dtype)]
    return f"{of.cls.__name__}({', '.join([*inner, *dtypes])})"


def flattened_format(parameter: nn.Parameter) -> Take | None:
    """How to take a tensor that holds other tensors apart; None for other parameters."""
    is_known = is_wrapper_subclass(parameter) and not isinstance(parameter, DTensor)
    return _take_flat if is_known else None


def _take_flat(module: nn.Module, parameter: Any) -> Parts:
    tensors: dict[str, Tensor] = {}
    outer = _flatten(parameter, "", tensors)
    least = SMALL * sum(t.nbytes for t in tensors.values())
    packed = {name: t for name, t in tensors.items() if t.dim() and t.nbytes >= least}
    whole = {name: t for name, t in tensors.items() if name not in packed}
    return Parts(packed=packed, whole=whole, recipe=_Flat(outer=outer))


def _flatten(tensor: Any, prefix: str, found: dict[str, Tensor]) -> _Class:
    """Describe a tensor that holds others, and add those that hold none to `found`."""
    names, context = tensor.__tensor_flatten__()
    inner: list[tuple[str, _Class | torch.dtype]] = []
    for name in names:
        held = getattr(tensor, name)
        if is_wrapper_subclass(held):
            inner.append((name, _flatten(held, f"{prefix}{name}_", found)))
        else:
            found[prefix + name] = held
            inner.append((name, held.dtype))
    return _Class(type(tensor), tuple(inner), context, tensor.size(), tensor.stride())


FORMATS = (bitsandbytes_format, flattened_format)
