"""Adapters merged into a base that is dequantised for it, as PEFT's users do with QLoRA.

    packed weights ──▶ plain layers in the base's dtype ──▶ the adapters, read from files ──▶ merged weights

PEFT itself would quantise the sum again and so lose most of what the adapters have learnt.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.pretrained.huggingface import (
    base_of,
    dtype_of,
    is_adapter_layer,
    transposed_class,
)
from fcdp_compile.quantised.weight import QuantisedWeight

_PLAIN = (nn.Linear, nn.Embedding)


def quantised_layers(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The layers with quantised weights: their names, themselves, and the names of the weights in them."""
    return [
        (name, module, child)
        for name, module in root.named_modules()
        for child, weight in module.named_children()
        if isinstance(weight, QuantisedWeight)
    ]


def refuse_unknown_layers(root: nn.Module) -> None:
    """Refuse to dequantise layers for which torch has no plain layer."""
    for name, module, _ in quantised_layers(root):
        if not isinstance(module, _PLAIN):
            raise FcdpError(
                f"{name} is a quantised {type(module).__name__}, and fcdp dequantises only linear layers and "
                "embeddings; save the adapter itself, without merge=True"
            )


def dense_bytes(root: nn.Module) -> int:
    """The bytes of all quantised weights once they are dequantised."""
    itemsize = (dtype_of(base_of(root)) or torch.float32).itemsize
    layers: list[Any] = [module for _, module, _ in quantised_layers(root)]
    return itemsize * sum(
        layer.in_features * layer.out_features
        if isinstance(layer, nn.Linear)
        else layer.num_embeddings * layer.embedding_dim
        for layer in layers
    )


def merged_into_dequantised(twin: Any) -> Any:
    """Return the base of a twin on the host, dequantised, with the twin's active adapters merged into it."""
    peft = import_module("peft")
    active, dtype = list(twin.active_adapters), dtype_of(base_of(twin))
    _forget_quantisation(base_of(twin))
    for name, module, child in quantised_layers(twin):
        twin.set_submodule(name, _plain(module, child, dtype))
    for config in twin.peft_config.values():
        if hasattr(config, "init_lora_weights"):
            # Other values change the base, which they have changed already.
            config.init_lora_weights = True
    layers: dict[str, Any] = {n: m for n, m in twin.named_modules() if is_adapter_layer(m)}
    # Adapters that are made anew draw random numbers, on this rank alone.
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder, selected_adapters=active, save_embedding_layers=False)
        base = twin.unload()
        at = {n: Path(folder) if n == "default" else Path(folder, n) for n in active}
        first, *others = active
        on_host = {"torch_device": "cpu"}  # PEFT would read to the GPU
        model = peft.PeftModel.from_pretrained(base, at[first], adapter_name=first, **on_host)
        for name in others:
            model.load_adapter(at[name], adapter_name=name, **on_host)
    for name, layer in layers.items():
        _continue(model.get_submodule(name), layer)
    return model.merge_and_unload(adapter_names=active)


def _continue(made: Any, before: Any) -> None:
    """Give an adapter that was read from files what a program has set, and files do not hold."""
    made.merged_adapters = list(before.merged_adapters)  # their sum is in the base already
    if isinstance(factors := getattr(before, "scaling", None), dict):
        made.scaling.update({n: factors[n] for n in made.scaling if n in factors})


def _plain(module: nn.Module, child: str, dtype: torch.dtype | None) -> nn.Module:
    """A plain layer with the dequantised weight and the other tensors of a quantised one."""
    weight: Any = module._modules[child]
    values = weight.recipe.dequantise(weight.join())
    values = values.to(dtype or values.dtype)
    kind: Any = next(c for c in type(module).__mro__ if c in _PLAIN)
    attributes = dict(vars(module))
    if (transposed := transposed_class(module)) is not None:
        kind, values = transposed, values.t().contiguous()
        attributes |= {"nx": module.in_features, "nf": module.out_features}
    plain: nn.Module = kind.__new__(kind)
    vars(plain).update(attributes)
    plain._parameters, plain._modules = dict(module._parameters), dict(module._modules)
    del plain._modules[child]
    plain.register_parameter(child, nn.Parameter(values, False))
    return plain


def _forget_quantisation(base: Any) -> None:
    base.is_loaded_in_4bit = base.is_loaded_in_8bit = False  # where PEFT looks
    if (quantiser := getattr(base, "hf_quantizer", None)) is not None:
        quantiser.remove_quantization_config(base)
    elif getattr(getattr(base, "config", None), "quantization_config", None) is not None:
        del base.config.quantization_config
