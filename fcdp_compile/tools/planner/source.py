"""Where the model of a plan comes from: the table, a Hugging Face configuration, or a user's function.

    "gpt-10b", "config.json", "your_module:build_fn"  ->  Source: a Build, and the identity of its saved trace

The tracer builds the models, on fake tensors: no weights, no memory.  Quantised base weights are packed
parameters as bitsandbytes makes them, without its kernels.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.cluster.model_table import MODELS
from fcdp_compile.cluster.requests import PACKED_FORMATS, PackedFormat
from fcdp_compile.errors import FcdpError, did_you_mean
from fcdp_compile.extras import require
from fcdp_compile.models.quantised.interface import Parts, Recipe
from fcdp_compile.models.quantised.weight import QuantisedWeight
from fcdp_compile.passes import partition
from fcdp_compile.tools.planner import traced
from fcdp_compile.tools.planner.traced import Build, Inputs, first_line


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is trained, as far as it changes the graphs.

    dtype: of computation.  Trained parameters are kept in fp32, frozen ones in `dtype`.  lora: rank of
    adapters on a frozen model, None to train everything.  quantise: how its linear layers are quantised, of
    `PACKED_FORMATS`; None: they are in `dtype`.  checkpointing: recompute activations by layer.
    attention: "sdpa", torch's fused attention, or "eager".
    """

    seq: int
    dtype: torch.dtype = torch.bfloat16
    lora: int | None = None
    quantise: str | None = None
    checkpointing: bool = True
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        if self.seq < 1:
            raise FcdpError(f"the sequence length must be at least 1, not {self.seq}")
        if self.lora is not None and self.lora < 1:
            raise FcdpError(f"the rank of LoRA adapters must be at least 1, not {self.lora}")
        if self.quantise is not None and self.lora is None:
            raise FcdpError(
                "quantised weights cannot be trained; give the rank of adapters with --lora, too"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model to trace.

    identity: equal for equal models, to find a saved trace; None if unknown, as for a user's function.
    """

    name: str
    build: Build
    identity: str | None = field(default=None)


def find_source(model: str, options: ModelOptions) -> Source:
    """Return a model of the table, of a configuration file, or of a function.

    Raises: FcdpError for any other name, a damaged configuration, or a missing library.
    """
    if model in MODELS:
        return _of_config(model, MODELS[model], options)
    path = Path(model)
    if path.suffix == ".json" or path.is_dir():
        return _of_config(model, _read_config(path), options)
    if ":" in model:
        return Source(name=model, build=partial(_call, _function(model), model))
    hint = did_you_mean(model, MODELS)
    raise FcdpError(
        f"unknown model {model!r}; give a Hugging Face config.json, a function as your_module:build_fn, or "
        f"one of {', '.join(MODELS)}{hint}"
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FcdpError(
            f"{file}: is not a JSON file ({error}); give a Hugging Face config.json"
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise FcdpError(
            f"{file}: model_type is missing, so this is not a Hugging Face configuration of a model"
        )
    return config


def _of_config(name: str, config: Mapping[str, Any], options: ModelOptions) -> Source:
    transformers = require("transformers", f"the configuration of {name}")
    if options.lora is not None:
        require("peft", "--lora")
    described = {
        "config": config,
        "options": [repr(options)],
        "versions": [torch.__version__, *map(_version, ("fcdp", "transformers", "peft"))],
        "code": [inspect.getsource(m) for m in (partition, traced, sys.modules[__name__])],
    }
    text = json.dumps(described, sort_keys=True)
    return Source(
        name=name,
        build=partial(_build, transformers, name, dict(config), options),
        identity=hashlib.sha256(text.encode()).hexdigest(),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _build(
    transformers: Any,
    name: str,
    config: dict[str, Any],
    options: ModelOptions,
    batch: int,
    seq: int,
) -> tuple[nn.Module, Inputs]:
    made = _config(transformers, name, config)
    made.use_cache = False
    # A configuration may name the dtype of the weights on disk, which need not be the one for training.
    made.dtype = torch.float32 if options.lora is None else options.dtype
    positions = getattr(made, "max_position_embeddings", None)
    if positions is not None and positions < seq:
        made.max_position_embeddings = seq  # tables of positions grow with it
    model = _model(transformers, name, made, options.attention)
    if options.lora is not None:
        peft = require("peft", "--lora")
        adapters = peft.LoraConfig(r=options.lora, target_modules="all-linear")
        model = peft.get_peft_model(model, adapters)
    if options.quantise is not None:
        pack_frozen(model, PACKED_FORMATS[options.quantise])
    if options.checkpointing:
        # nn.Module's attributes are typed as tensors
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.zeros(batch, seq, dtype=torch.long, device="cpu")
    return model, {"input_ids": ids, "labels": ids.clone()}


def _config(transformers: Any, name: str, config: dict[str, Any]) -> Any:
    values = {k: v for k, v in config.items() if k != "model_type"}
    try:
        return transformers.AutoConfig.for_model(config["model_type"], **values)
    except Exception as error:  # a configuration class may raise anything for wrong values
        raise FcdpError(f"{name}: transformers refuses the configuration ({error})") from None


def _model(transformers: Any, name: str, config: Any, attention: str) -> nn.Module:
    auto = _auto_class(transformers, name, config)
    try:
        # Never run code that a configuration names, and never ask the user to allow it.
        model: nn.Module = auto.from_config(
            config, attn_implementation=attention, trust_remote_code=False
        )
    except ValueError as error:
        raise FcdpError(
            f"{name}: transformers makes no model of type {config.model_type!r} "
            f"({str(error).splitlines()[0]}); {_GIVE_A_FUNCTION}"
        ) from None
    return model


_GIVE_A_FUNCTION = (
    "give a function your_module:build_fn that returns the model and a mapping of all inputs of its "
    "forward, labels too"
)


def _auto_class(transformers: Any, name: str, config: Any) -> Any:
    """Return the class that builds a configuration's model, which takes ids, and labels of their shape.

    Raises: FcdpError for a type that is not a language model, for architectures with other inputs, and if the
    configuration does not say what an encoder is trained for.
    """
    found = [
        (auto, made.__name__)
        for auto, mapping in (
            (transformers.AutoModelForCausalLM, transformers.MODEL_FOR_CAUSAL_LM_MAPPING),
            (transformers.AutoModelForMaskedLM, transformers.MODEL_FOR_MASKED_LM_MAPPING),
        )
        for made in _classes_in(mapping, type(config))
    ]
    if not found:
        raise FcdpError(
            f"{name}: transformers has no causal or masked language model of type "
            f"{config.model_type!r}; {_GIVE_A_FUNCTION}"
        )
    known = " or ".join(dict.fromkeys(f'"architectures": ["{made}"]' for _, made in found))
    if asked := config.architectures:
        # Some publishers write the class name with other capitals than transformers.
        folded = {str(each).casefold() for each in asked}
        for auto, made in found:
            if made.casefold() in folded:
                return auto
        raise FcdpError(
            f"{name}: fcdp does not know the inputs of {', '.join(map(str, asked))} (from architectures); "
            f"for language modelling set {known}; otherwise {_GIVE_A_FUNCTION}"
        )
    if len(found) > 1 and not getattr(config, "is_decoder", False):
        raise FcdpError(
            f"{name}: models of type {config.model_type!r} are trained in several ways, and architectures "
            f"does not say in which; set {known}, or {_GIVE_A_FUNCTION}"
        )
    return found[0][0]


def _classes_in(mapping: Any, config_type: type) -> tuple[type, ...]:
    if config_type not in mapping:
        return ()
    made = mapping[config_type]
    return made if isinstance(made, tuple) else (made,)


def _function(name: str) -> Any:
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:  # as with `python -m`
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise FcdpError(f"{name}: cannot import {module_name!r} ({error})") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise FcdpError(f"{name}: module {module_name!r} has no function {function_name!r}")
    return function


def _call(function: Any, name: str, batch: int, seq: int) -> tuple[nn.Module, Inputs]:
    try:
        inspect.signature(function).bind(batch, seq)
    except TypeError as error:
        raise FcdpError(
            f"{name} cannot be called with a batch size and a sequence length ({error})"
        ) from None
    except ValueError:  # some functions that are not written in Python have no signature
        pass
    try:
        made = function(batch, seq)
    except FcdpError:
        raise
    except Exception as error:  # a user's function may raise anything for tensors without values
        raise FcdpError(
            f"{name}({batch}, {seq}) failed ({first_line(error)}); while fcdp calls it, tensors are fake and "
            "have no values; build the model from its configuration, without weights from files"
        ) from error
    if isinstance(made, nn.Module):
        raise FcdpError(
            f"{name} returned a model alone, without inputs to trace it with: "
            f"{_inputs_of(made)}; return a pair of the model and a mapping such as "
            "{'input_ids': torch.zeros(batch, seq, dtype=torch.long)}"
        )
    if not isinstance(made, tuple) or len(made) != 2:
        raise FcdpError(
            f"{name} returned {type(made).__name__}; return a pair of an nn.Module and the inputs of its "
            "forward"
        )
    return made


def _inputs_of(model: nn.Module) -> str:
    code: Any = model.forward.__code__
    names = code.co_varnames[1 : code.co_argcount]
    return f"its forward takes {', '.join(names)}" if names else "its forward names none"


@torch.library.custom_op("fcdp::dequantise", mutates_args=())
def _dequantise(packed: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    """The kernel of a library in a plan's graphs: a weight from its packed values and scales."""
    raise FcdpError(
        "fcdp::dequantise stands for a kernel in a plan; its graphs have no values to run on"
    )


@_dequantise.register_fake
def _fake_dequantise(
    packed: Tensor, scales: Tensor, shape: list[int], dtype: torch.dtype
) -> Tensor:
    return packed.new_empty(shape, dtype=dtype)


@dataclass(frozen=True, kw_only=True)
class _Dequantised(Recipe):
    """The recipe of a weight that a kernel dequantises at each use."""

    shape: torch.Size
    dtype: torch.dtype
    meaning = "planned"

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        made: Tensor = torch.ops.fcdp.dequantise(
            tensors["packed"], tensors["absmax"], list(self.shape), self.dtype
        )
        return made

    def dequantise(self, weight: Tensor) -> Tensor:
        return weight


class PackedLinear(nn.Module):
    """A linear layer with a quantised weight."""

    def __init__(self, linear: nn.Linear, packing: PackedFormat) -> None:
        super().__init__()
        self.weight = QuantisedWeight(_parts(linear.weight, packing))
        self.bias = linear.bias

    def forward(self, values: Tensor) -> Tensor:
        """The product with the dequantised weight."""
        return nn.functional.linear(values, self.weight.join(), self.bias)


def _parts(weight: Tensor, packing: PackedFormat) -> Parts:
    """The tensors of a quantised weight, cut between blocks where blocks are whole."""
    count, block = weight.numel(), packing.block or weight.shape[1]
    in_bytes = -(-count * packing.bits // 8)
    block_bytes = block * packing.bits // 8
    shape = (in_bytes,) if count % block else (count // block, block_bytes)
    recipe = _Dequantised(shape=weight.shape, dtype=weight.dtype)
    return Parts(
        packed={
            "packed": weight.new_empty(shape, dtype=torch.uint8),
            "absmax": weight.new_empty(-(-count // block), dtype=torch.float32),
        },
        whole={},
        recipe=recipe,
    )


def pack_frozen(model: nn.Module, packing: PackedFormat) -> None:
    """Quantise the frozen linear layers of a model, all but the one of its results, as transformers does."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is not nn.Linear or child is head:
                continue
            if not child.weight.requires_grad:
                setattr(module, name, PackedLinear(child, packing))
