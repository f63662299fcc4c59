"""Weights that bitsandbytes quantises: Params4bit (NF4, FP4) and Int8Params.

The library is never imported here: a model can hold such a weight only if somebody has imported the library.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from fcdp_compile.errors import ArgumentError
from fcdp_compile.models.quantised.interface import Parts, Quantiser, Recipe, Saved, Take


def bitsandbytes_format(parameter: nn.Parameter) -> Take | None:
    """How to take one of bitsandbytes' weights apart; None for other parameters."""
    if (library := sys.modules.get("bitsandbytes")) is None:
        return None
    if isinstance(parameter, library.nn.Params4bit):
        return _take_4bit
    if isinstance(parameter, library.nn.Int8Params):
        return _take_8bit
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nested:
    """The scales of scales: values that share one, and the dtype that they are dequantised to."""

    blocksize: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class _OfValues(Recipe):
    """A weight that the library makes of values of this shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def source_dtype(self) -> torch.dtype:
        return self.dtype

    def made_of(self, dtype: torch.dtype) -> Self:
        return replace(self, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class _FourBit(_OfValues):
    """bitsandbytes' Params4bit: NF4 or FP4.

    storage: the dtype that the packed bytes are shown as.
    """

    blocksize: int
    quant_type: str
    storage: torch.dtype
    nested: _Nested | None

    code_book = "quant_map"

    @property
    def meaning(self) -> str:
        return f"{self.quant_type} {tuple(self.shape)} in blocks of {self.blocksize}"

    @property
    def quantiser(self) -> Quantiser:
        return _FourBitQuantiser(
            shape=self.shape,
            dtype=self.dtype,
            row_elements=None if self.shape.numel() % self.blocksize else self.blocksize,
            asked=() if self.nested is None else ("absmax",),
            blocksize=self.blocksize,
            quant_type=self.quant_type,
        )

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
        values = tensors["packed"].view(-1).view(self.storage).view(-1, 1)
        if torch.compiler.is_compiling():  # Dynamo makes no parameters
            marked: Any = values  # the layers' own forwards read these
            marked.quant_state, marked.blocksize = state, self.blocksize
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

    def saved(self, leaf: str) -> Saved:
        whole = ["quant_map"] + ["nested_absmax", "nested_quant_map"] * (self.nested is not None)
        return Saved(
            parts={leaf: "packed"} | {f"{leaf}.{name}": name for name in ("absmax", *whole)},
            state=f"{leaf}.quant_state.bitsandbytes__{self.quant_type}",
            read=self._described_by,
        )

    def _described_by(self, state: Tensor) -> tuple[Recipe, Mapping[str, Tensor]]:
        try:
            found = json.loads(bytes(state.tolist()))
            theirs = [tuple(found["shape"]), found["blocksize"], found.get("nested_blocksize")]
            dtype = getattr(torch, found["dtype"])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ArgumentError(f"is described by text that cannot be read ({error!r})") from None
        nested = None if self.nested is None else self.nested.blocksize
        if theirs != (ours := [tuple(self.shape), self.blocksize, nested]):
            names = "shape, block size and block size of the scales"
            raise ArgumentError(f"has {names} {theirs}, but the model's layer has {ours}")
        offset = found.get("nested_offset")
        parts = {} if offset is None else {"nested_offset": torch.tensor(offset, device="cpu")}
        return self.made_of(dtype), parts

    def dequantise(self, weight: Any) -> Tensor:
        library = sys.modules["bitsandbytes"].functional
        values: Tensor = library.dequantize_4bit(weight.data, weight.quant_state)
        return values

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        # In an evaluation on some CPUs the library would write reordered bytes to the weight.
        return {"quant_state": None, "support_avx512bf16_for_cpu": False}


@dataclass(frozen=True, kw_only=True)
class _FourBitQuantiser(Quantiser):
    """What bitsandbytes' `quantize_4bit` does, in blocks; nested scales need the mean of all scales."""

    blocksize: int
    quant_type: str

    def quantise(self, values: Tensor) -> dict[str, Tensor]:
        library = sys.modules["bitsandbytes"].functional
        packed, state = library.quantize_4bit(
            values, blocksize=self.blocksize, quant_type=self.quant_type
        )
        return {"packed": packed, "absmax": state.absmax}

    def finish(self, asked: Mapping[str, Tensor]) -> dict[str, Tensor]:
        library = sys.modules["bitsandbytes"].functional
        if not self.asked:
            return {"quant_map": library.get_4bit_type(self.quant_type, device="cpu")}
        scales = asked["absmax"]
        offset = scales.mean()
        absmax, state = library.quantize_blockwise(scales - offset, blocksize=_SCALES_OF_A_SCALE)
        return {
            "absmax": absmax,
            "quant_map": library.get_4bit_type(self.quant_type, device=scales.device),
            "nested_absmax": state.absmax,
            "nested_quant_map": state.code,
            "nested_offset": offset,
        }


_SCALES_OF_A_SCALE = 256
"""Scales that share a scale with double quantisation; the library knows no other number."""


def _state_on_meta(library: Any, parameter: Any) -> tuple[Tensor, Any]:
    """What the library will make of a Params4bit on meta: its packed bytes and its state."""
    count = -(-parameter.numel() // parameter.blocksize)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    state = library.functional.QuantState(
        absmax=empty(count, dtype=torch.uint8 if parameter.compress_statistics else torch.float32),
        shape=parameter.shape,
        code=empty(16),
        blocksize=parameter.blocksize,
        quant_type=parameter.quant_type,
        dtype=parameter.dtype,
    )
    if parameter.compress_statistics:
        state.nested, state.offset = True, empty()
        state.state2 = library.functional.QuantState(
            absmax=empty(-(-count // _SCALES_OF_A_SCALE)),
            code=empty(256),
            blocksize=_SCALES_OF_A_SCALE,
            dtype=torch.float32,
        )
    return empty(-(-parameter.numel() // 2), dtype=torch.uint8), state


def _take_4bit(module: nn.Module, parameter: Any) -> Parts:
    state, values, storage = parameter.quant_state, parameter.data, parameter.dtype
    if state is None and parameter.is_meta:
        values, state = _state_on_meta(sys.modules["bitsandbytes"], parameter)
        storage = parameter.quant_storage
    if state is None:
        raise _not_yet(parameter)
    if getattr(state, "packing_format_for_cpu", False):
        # An evaluation on this CPU has reordered the bytes for its kernel; saving brings the order back.
        module.state_dict()
        state, values = parameter.quant_state, parameter.data
    if state.absmax.dim() == 2:  # as the CPU's kernel had the scales: [blocks of a row, rows], bf16
        state.absmax = state.absmax.t().reshape(-1).float()
    values = values.reshape(-1).view(torch.uint8)
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
        storage=storage,
        nested=nested,
    )
    return Parts(packed={"packed": values, "absmax": state.absmax}, whole=whole, recipe=recipe)


def _forward_8bit(self: Any, x: Tensor) -> Tensor:
    # The library's own forward keeps the whole weight in the module.
    weight, bias, state = self.weight, self.bias, _state_8bit(self)
    state.CB, state.SCB, state.is_training = weight.CB, weight.SCB, self.training
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


@dataclass(frozen=True, kw_only=True)
class _EightBit(_OfValues):
    """bitsandbytes' Int8Params of a Linear8bitLt; its rows are quantised by themselves."""

    members = MappingProxyType({"forward": _forward_8bit})

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        values, scales = tensors["packed"], tensors["SCB"]
        if torch.compiler.is_compiling():
            marked: Any = values
            marked.CB, marked.SCB = values.view_as(values), scales
            return values
        library = sys.modules["bitsandbytes"]
        weight: Tensor = library.nn.Int8Params(
            values, requires_grad=False, has_fp16_weights=False, CB=values, SCB=scales
        )
        return weight

    def dequantise(self, weight: Any) -> Tensor:
        library = sys.modules["bitsandbytes"].functional
        values: Tensor = library.int8_vectorwise_dequant(weight.data, weight.SCB)
        return values

    def attributes(self, module: nn.Module) -> dict[str, Any]:
        return {"state": _state_8bit(module)}

    @property
    def meaning(self) -> str:
        return "int8 with a scale for each row"

    def saved(self, leaf: str) -> Saved:
        return Saved(
            parts={leaf: "packed", "SCB": "SCB"}, state="weight_format", read=self._described_by
        )

    def _described_by(self, state: Tensor) -> tuple[Recipe, Mapping[str, Tensor]]:
        if state.item() != 0:
            raise ArgumentError(
                "is not stored by rows; load and save it with a newer bitsandbytes, which stores it by rows"
            )
        return self.made_of(torch.float16), {}

    @property
    def quantiser(self) -> Quantiser:
        return _EightBitQuantiser(shape=self.shape, dtype=self.dtype, row_elements=self.shape[1])


class _EightBitQuantiser(Quantiser):
    """What bitsandbytes does when a Linear8bitLt moves to its device."""

    def quantise(self, values: Tensor) -> dict[str, Tensor]:
        library = sys.modules["bitsandbytes"].functional
        rows = values.view(-1, self.shape[1]).to(torch.float16)
        packed, scales, _ = library.int8_vectorwise_quant(rows)
        return {"packed": packed, "SCB": scales}


def _take_8bit(module: Any, parameter: Any) -> Parts:
    if parameter.has_fp16_weights:
        raise ArgumentError(
            "is an Int8Params with has_fp16_weights=True, which bitsandbytes quantises in each forward; "
            "make the layer with has_fp16_weights=False"
        )
    linear = sys.modules["bitsandbytes"].nn.Linear8bitLt
    if getattr(type(module), "forward", None) is not linear.forward:
        raise ArgumentError(
            f"is an Int8Params of a {type(module).__name__}, whose forward fcdp does not know; use "
            "bitsandbytes' Linear8bitLt, or Linear4bit"
        )
    values, dtype = parameter.data, torch.float16
    scales = parameter.SCB if parameter.SCB is not None else module.state.SCB
    if scales is None and parameter.is_meta:
        dtype = values.dtype
        values = values.to(torch.int8)
        scales = torch.empty(len(values), device="meta")
    if scales is None:
        raise _not_yet(parameter)
    recipe = _EightBit(shape=values.shape, dtype=dtype)
    return Parts(packed={"packed": values, "SCB": scales}, whole={}, recipe=recipe)


def _not_yet(parameter: object) -> ArgumentError:
    return ArgumentError(
        f"is a {type(parameter).__name__} that is not quantised yet; move the model to its device "
        "(model.to(device)), which quantises it, before shard, or build it on meta and load it after shard"
    )
