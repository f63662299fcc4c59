"""What fcdp knows of the libraries that quantise weights; no other module knows a format.

[Note: packed weights]
A quantised weight is several tensors that the library keeps in one: packed values, one scale for each block of
values, perhaps scales of these scales, and a code book.  A format takes them apart and puts them together:

* *Packed*: tensors that are cut over the ranks.  A row of their first dimension is a whole number of blocks, so
  a rank's rows can be quantised and read alone, and the scales of a block are with its values.
* *Whole*: tensors so small that each rank has them.

    bitsandbytes, 4 bits       packed: values [blocks, 32 bytes], scales [blocks] (fp32, or 8 bits if nested)
                               whole: code book [16]; if nested, scales of 256 scales, their code book and offset
    bitsandbytes, 8 bits       packed: values [out, in], scales [out]
    torchao and its like       what `__tensor_flatten__` names

Sources: QLoRA (Dettmers et al., 2023), section 3 (NF4, double quantisation); LLM.int8() (Dettmers et al., 2022).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import ArgumentError
from fcdp_compile.torch_compat import FakeTensor, is_wrapper_subclass

SMALL = 0.01
"""A tensor stays whole if it has less than this part of its weight's bytes: its gathers would cost more."""


class Recipe(Protocol):
    """How the tensors of one weight become what the library's kernels take."""

    members: Mapping[str, Callable[..., Any]]
    """Methods that the module's class needs in place of the library's."""

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight, from all its tensors by name; a plain tensor with the library's attributes in a graph."""

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        """Attributes of the module that must change, because they hold the weight or write to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A quantised weight taken apart; see [Note: packed weights]."""

    packed: Mapping[str, Tensor]
    whole: Mapping[str, Tensor]
    recipe: Recipe


def take_apart(module: nn.Module, name: str) -> Parts | None:
    """The parts of a module's parameter; None if it is a plain tensor.

    The parts share the parameter's memory.

    Raises: ArgumentError for a parameter in a format that fcdp does not know, one that is trainable, and one
    that its library has yet to quantise.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    for format_of in (_bitsandbytes, _flattened):
        if (take := format_of(parameter)) is not None:
            if parameter.requires_grad:
                raise ArgumentError(
                    "is quantised but trainable, and its gradients would be sharded as if it had plain values; "
                    "call requires_grad_(False) on it and train adapters"
                )
            return take(module, parameter)
    if _has_meaning_of_its_own(parameter):
        raise ArgumentError(
            f"is a {type(parameter).__name__}, whose values fcdp cannot take apart; quantise with bitsandbytes "
            "(Linear4bit, Linear8bitLt) or torchao, or dequantise it before shard"
        )
    return None


def _has_meaning_of_its_own(parameter: nn.Parameter) -> bool:
    """Whether a tensor's class gives its values another meaning than a plain tensor's."""
    if type(parameter) in (Tensor, nn.Parameter) or isinstance(parameter, FakeTensor | DTensor):
        return False
    own = type(parameter)
    changes = own.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return changes or not parameter.is_floating_point()


_Take = Callable[[nn.Module, nn.Parameter], Parts]

_NO_MEMBERS: Mapping[str, Callable[..., Any]] = MappingProxyType({})


# --- bitsandbytes -----------------------------------------------------------------------------------------


def _bitsandbytes(parameter: nn.Parameter) -> _Take | None:
    if (library := sys.modules.get("bitsandbytes")) is None:  # then nobody can have made such a parameter
        return None
    if isinstance(parameter, library.nn.Params4bit):
        return _take_4bit
    if isinstance(parameter, library.nn.Int8Params) and not parameter.has_fp16_weights:
        return _take_8bit
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nested:
    """The scales of scales: values that share one, and the dtype that they are dequantised to."""

    blocksize: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _FourBit:
    """bitsandbytes' Params4bit: NF4 or FP4.

    storage: the dtype that the packed bytes are shown as.
    """

    shape: torch.Size
    blocksize: int
    quant_type: str
    dtype: torch.dtype
    storage: torch.dtype
    nested: _Nested | None

    members = _NO_MEMBERS  # Linear4bit's own forward reads the weight and its `quant_state`

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        library = sys.modules["bitsandbytes"]
        state2 = None
        if self.nested is not None:
            state2 = library.functional.QuantState(
                absmax=tensors["nested_absmax"],
                code=tensors["nested_quant_map"],
                blocksize=self.nested.blocksize,
                dtype=self.nested.dtype,
            )
        state = library.functional.QuantState(
            absmax=tensors["absmax"],
            shape=self.shape,
            code=tensors["quant_map"],
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            dtype=self.dtype,
            offset=tensors.get("nested_offset"),
            state2=state2,
        )
        values = tensors["packed"].view(-1, 1).view(self.storage)
        if torch.compiler.is_compiling():  # Dynamo makes no parameters
            values.quant_state = state
            return values
        weight: Tensor = library.nn.Params4bit(
            values,
            requires_grad=False,
            quant_state=state,
            blocksize=self.blocksize,
            compress_statistics=self.nested is not None,
            quant_type=self.quant_type,
            quant_storage=self.storage,
            bnb_quantized=True,
        )
        return weight

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        # In an evaluation on some CPUs the library would write reordered bytes to the weight.
        return {"quant_state": None, "support_avx512bf16_for_cpu": False}


def _take_4bit(module: nn.Module, parameter: Any) -> Parts:
    state = parameter.quant_state
    if state is None:
        raise ArgumentError(
            "is a Params4bit that is not quantised yet; move the model to its device (model.to(device)), which "
            "quantises it, before shard"
        )
    if getattr(state, "packing_format_for_cpu", False):
        # An evaluation on this CPU has reordered the bytes for its kernel; saving brings the order back.
        module.state_dict()
        state = parameter.quant_state
    values = parameter.data.reshape(-1).view(torch.uint8)
    if state.shape.numel() % state.blocksize == 0:
        values = values.view(-1, state.blocksize // 2)
    whole, nested = {"quant_map": state.code}, None
    if state.nested:
        nested = _Nested(blocksize=state.state2.blocksize, dtype=state.state2.dtype)
        whole |= {
            "nested_absmax": state.state2.absmax,
            "nested_quant_map": state.state2.code,
            "nested_offset": state.offset,
        }
    recipe = _FourBit(
        shape=state.shape,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=state.dtype,
        storage=parameter.dtype,
        nested=nested,
    )
    return Parts(packed={"packed": values, "absmax": state.absmax}, whole=whole, recipe=recipe)


def _forward_8bit(self: Any, x: Tensor) -> Tensor:
    # The library's own forward keeps the whole weight in the module.
    weight, bias, state = self.weight, self.bias, _state_8bit(self)
    state.CB, state.SCB, state.is_training = weight, weight.SCB, self.training
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    result: Tensor = sys.modules["bitsandbytes"].matmul(x, weight, bias=bias, state=state)
    return result


def _state_8bit(module: Any) -> Any:
    """A state for multiplications like the module's, without its weight."""
    state = sys.modules["bitsandbytes"].MatmulLtState()
    state.threshold, state.use_pool = module.state.threshold, module.state.use_pool
    state.has_fp16_weights = False
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class _EightBit:
    """bitsandbytes' Int8Params of a Linear8bitLt."""

    members = MappingProxyType({"forward": _forward_8bit})

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        values, scales = tensors["packed"], tensors["SCB"]
        if torch.compiler.is_compiling():
            values.SCB = scales  # type: ignore[attr-defined]  # the library's attribute
            return values
        library = sys.modules["bitsandbytes"]
        weight: Tensor = library.nn.Int8Params(
            values, requires_grad=False, has_fp16_weights=False, CB=values, SCB=scales
        )
        return weight

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        return {"state": _state_8bit(module)}


def _take_8bit(module: Any, parameter: Any) -> Parts:
    library = sys.modules["bitsandbytes"]
    linear = library.nn.Linear8bitLt
    if getattr(type(module), "forward", None) is not linear.forward:
        raise ArgumentError(
            f"is an Int8Params of a {type(module).__name__}, whose forward fcdp does not know; use bitsandbytes' "
            "Linear8bitLt, or Linear4bit"
        )
    scales = parameter.SCB if parameter.SCB is not None else module.state.SCB
    if scales is None:
        raise ArgumentError(
            "is an Int8Params that is not quantised yet; move the model to its device (model.to(device)), which "
            "quantises it, before shard"
        )
    return Parts(packed={"packed": parameter.data, "SCB": scales}, whole={}, recipe=_EightBit())


# --- torchao, and every other class of tensors that names its inner tensors -------------------------------


class _Class(NamedTuple):
    """A subclass of Tensor that holds others, as `__tensor_flatten__` describes it.

    inner: the names of the tensors that it holds, each with their class; None: a plain tensor.
    """

    cls: Any
    inner: tuple[tuple[str, _Class | None], ...]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flat:
    """A tensor that was taken apart by `__tensor_flatten__`."""

    outer: _Class

    members = _NO_MEMBERS

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return _joined(self.outer, tensors, "")

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        return {}


def _joined(of: _Class, tensors: Mapping[str, Tensor], prefix: str) -> Tensor:
    inner = {
        name: tensors[prefix + name] if within is None else _joined(within, tensors, f"{prefix}{name}_")
        for name, within in of.inner
    }
    joined: Tensor = of.cls.__tensor_unflatten__(inner, of.context, of.size, of.stride)
    return joined


def _flattened(parameter: nn.Parameter) -> _Take | None:
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
    inner: list[tuple[str, _Class | None]] = []
    for name in names:
        held = getattr(tensor, name)
        if is_wrapper_subclass(held):
            inner.append((name, _flatten(held, f"{prefix}{name}_", found)))
        else:
            found[prefix + name] = held
            inner.append((name, None))
    return _Class(type(tensor), tuple(inner), context, tensor.size(), tensor.stride())
