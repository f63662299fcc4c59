"""Quantised weights as modules of plain frozen parameters, which `shard` cuts like any other.

A format is a function of a parameter that takes it apart, whatever library has made it; it returns None for a
parameter of another format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import ArgumentError
from fcdp_compile.models.quantised.bitsandbytes import bitsandbytes_format
from fcdp_compile.models.quantised.interface import Parts, Recipe, Take
from fcdp_compile.torch_compat import FakeTensor, is_wrapper_subclass


class QuantisedWeight(nn.Module):
    """A quantised weight: its packed tensors as parameters, its small ones as buffers.

    Values of one byte (int8, float8) are held as uint8: what is sent are bytes.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.recipe: Recipe = parts.recipe
        self._dtypes: Mapping[str, torch.dtype] = {n: t.dtype for n, t in parts.packed.items()}
        for name, tensor in parts.packed.items():
            plain = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            self.register_parameter(name, nn.Parameter(plain, requires_grad=False))
        for name, tensor in parts.whole.items():
            self.register_buffer(name, tensor)

    def join(self) -> Tensor:
        """The weight as the library's kernels take it.

        Where parameters are home shards (outside of the model's forward), the first of them: its device and
        dtype are right, its values are packed.
        """
        tensors: dict[str, Tensor] = dict(self._buffers)  # type: ignore[arg-type]  # no buffer is None
        for name, dtype in self._dtypes.items():
            value: Tensor = getattr(self, name)
            if isinstance(value, DTensor):
                return value
            tensors[name] = value.view(dtype)
        return self.recipe.join(tensors)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *others: Any, **kwargs: Any
    ) -> None:
        """Refuse the bytes of a format that only a code book tells from this one."""
        name = self.recipe.code_book
        here, there = self._buffers.get(name or ""), state_dict.get(f"{prefix}{name}")
        if here is not None and not here.is_meta and isinstance(there, Tensor):
            is_alike = here.shape == there.shape and torch.allclose(there.to(here), here, atol=0.01)
            if not is_alike:  # more than a conversion to another dtype
                *_, errors = others
                errors.append(
                    f"{prefix}{name} is not the code book of {self.recipe.meaning}; load the weights into a "
                    "model that was quantised like the one that was saved"
                )
        super()._load_from_state_dict(state_dict, prefix, *others, **kwargs)

    @property
    def meaning(self) -> tuple[str, str | None]:
        """What a checkpoint keeps of the recipe: what the bytes stand for, and the source's dtype."""
        dtype = self.recipe.source_dtype
        return self.recipe.meaning, None if dtype is None else str(dtype).removeprefix("torch.")


def quantised_weights(root: nn.Module) -> Iterator[tuple[str, QuantisedWeight]]:
    """The quantised weights of a model, by name; a tied one once."""
    yield from ((n, m) for n, m in root.named_modules() if isinstance(m, QuantisedWeight))


def packed_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that are parts of quantised weights."""
    return {p for _, weight in quantised_weights(model) for p in weight.parameters()}


@contextmanager
def unfolded(model: Any, ignored: Collection[str]) -> Iterator[None]:
    """Make each quantised weight of a model a module of plain parameters; undone if the block raises.

    ignored: names of parameters that stay as they are.

    Raises: ArgumentError for a quantised weight that fcdp cannot take apart.
    """
    made: dict[nn.Parameter, QuantisedWeight] = {}  # a tied weight stays tied
    with ExitStack() as undo:
        for path, module in list(model.named_modules()) if isinstance(model, nn.Module) else ():
            for name, parameter in list(module._parameters.items()):
                full_name = f"{path}.{name}" if path else name
                if parameter is None or full_name in ignored or "_fcdp" in vars(module):
                    continue
                if parameter not in made:
                    try:
                        parts = take_apart(module, name)
                    except ArgumentError as error:
                        raise ArgumentError(f"parameter {full_name!r} {error}") from None
                    if parts is None:
                        continue
                    made[parameter] = QuantisedWeight(parts)
                undo.callback(_unfold(module, name, made[parameter]))
        yield
        undo.pop_all()


def _unfold(module: nn.Module, name: str, weight: QuantisedWeight) -> Callable[[], None]:
    """Put a `QuantisedWeight` in the place of a module's parameter; returns what undoes this."""
    own, parameters = type(module), dict(module._parameters)
    changed = {n: v for n, v in weight.recipe.attributes(module).items() if n in vars(module)}
    attributes = {n: vars(module)[n] for n in changed}
    del module._parameters[name]
    module._modules[name] = weight
    vars(module).update(changed)
    members: dict[str, Any] = {name: _joining(name), **weight.recipe.members}
    # The library's own would add what they read from the weight, in another form.
    for hook in ("_save_to_state_dict", "_load_from_state_dict"):
        members[hook] = getattr(nn.Module, hook)
    members |= {"__module__": own.__module__, "__qualname__": own.__qualname__}
    module.__class__ = type(own.__name__, (own,), members)

    def undo() -> None:
        module.__class__ = own
        vars(module).update(attributes)
        del module._modules[name]
        module._parameters = parameters  # in the order of before

    return undo


def _joining(name: str) -> property:
    def get(self: nn.Module) -> Tensor:
        weight = self._modules.get(name)
        if not isinstance(weight, QuantisedWeight):
            # Somebody has assigned a parameter, which nn.Module finds; the next forward refuses it.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return weight.join()

    return property(get)


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
