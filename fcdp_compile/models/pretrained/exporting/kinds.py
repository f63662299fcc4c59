"""The files of each kind of model, written by its library's own `save_pretrained`, called on a whole twin.

Transformers' model     weights, configuration, generation configuration
PEFT's                  the adapters; or its base with the adapters merged into it
any other               model.safetensors with the names of its state dict

`reader_of` returns the tensors of these files without writing files.

Adapters are merged into a quantised base that is dequantised for it, as PEFT's users do with QLoRA:

    packed weights ──▶ plain layers in the base's dtype ──▶ the adapters, read from files ──▶ merged weights

PEFT itself would quantise the sum again and so lose most of what the adapters have learnt.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.models.files.safetensors_file import write_tensors
from fcdp_compile.models.pretrained.huggingface import (
    as_in_checkpoint,
    base_of,
    dtype_of,
    has_attached_adapters,
    is_adapter_layer,
    is_transformers_model,
    let_this_rank_save,
    transposed_class,
)
from fcdp_compile.models.quantised.weight import QuantisedWeight
from fcdp_compile.torch_compat.tensors import storage_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Saver:
    """How a model is written.

    name: compared between ranks.  write: writes the files of a twin to a folder.
    adapters: None if the twin must be whole.  Otherwise the twin begins with the adapters alone, and
    `adapters` returns the tensors that `write` will write: some may be the base's, such as embeddings.
    more_bytes: the host memory that writing takes besides the twin.
    """

    name: str
    write: Callable[[Any, Path], None]
    adapters: Callable[[Any], Iterable[Tensor]] | None = None
    more_bytes: int = 0


def kind_of(root: Any, folder: Path, *, merge: bool, max_shard_size: int | str) -> Saver:
    """Return how to write a model.

    folder: the final place of the files.

    Raises: FcdpError for adapters that cannot be merged, and for a quantised model.
    """
    if merge:
        _refuse_to_merge(root)
    elif base_of(root) is not root:
        write = partial(_write_adapters, folder=folder)
        return Saver(name="adapters", write=write, adapters=_adapters)
    elif has_attached_adapters(root):
        return Saver(
            name="adapter",
            write=_write_attached,
            adapters=lambda twin: _tensors_attached(twin).values(),
        )
    merged: Callable[[Any], Any] | None = _merged if merge else None
    layers = quantised_layers(root)
    if merge and layers:
        _refuse_unknown(layers)
        merged = merged_into_dequantised
    elif getattr(base_of(root), "hf_quantizer", None) is not None:
        raise FcdpError(
            f"{type(base_of(root)).__name__} is quantised, and fcdp writes no quantised weights; add "
            "adapters, and save them, or the dequantised base with the adapters merged into it (merge=True)"
        )
    return Saver(
        name=f"merged {root.base_model.active_adapters}" if merge else "model",
        write=partial(_write_whole, merged=merged, max_shard_size=max_shard_size),
        more_bytes=_dense_bytes(root, layers),
    )


def reader_of(root: Any, *, only: str) -> Callable[[Any], dict[str, Tensor]]:
    """Return a function that reads, from a twin, the tensors that `save_pretrained` would write, by name.

    The function may change the twin.  only: "adapters", those of the active adapter; or "all", for a PEFT
    model the base with the active adapters merged into it.

    Raises: FcdpError for a model without adapters, for adapters that cannot be merged, and for a quantised
    base.
    """
    is_wrapped = base_of(root) is not root
    if only == "adapters":
        if is_wrapped:
            return partial(_tensors_of_adapter, name=_active_adapter(root))
        if has_attached_adapters(root):
            return _tensors_attached
        raise FcdpError(
            f"only='adapters' needs a model with adapters of PEFT, and {type(root).__name__} has none; use "
            "only='all'"
        )
    if quantised_layers(root) or getattr(base_of(root), "hf_quantizer", None) is not None:
        raise FcdpError(
            f"{type(base_of(root)).__name__} is quantised, and fcdp streams no quantised weights; stream its "
            "adapters with only='adapters', or write the dequantised base with the adapters merged into it "
            "(save_pretrained with merge=True)"
        )
    if has_attached_adapters(root):
        raise FcdpError(
            f"fcdp does not merge the adapters that add_adapter has put into {type(root).__name__}; stream "
            "them with only='adapters', or add them with peft.get_peft_model"
        )
    if is_wrapped:
        _refuse_to_merge(root)
    return partial(_tensors_of_model, merged=_merged if is_wrapped else None)


# --- whole models -----------------------------------------------------------------------------------------


def _merged(twin: Any) -> Any:
    return twin.merge_and_unload()


def _write_whole(
    twin: Any, folder: Path, *, merged: Callable[[Any], Any] | None, max_shard_size: int | str
) -> None:
    model = twin if merged is None else merged(twin)
    state = model.state_dict()
    if is_transformers_model(model):
        _copy_own_ties(model, state)
        let_this_rank_save(model)
        model.save_pretrained(folder, state_dict=state, max_shard_size=max_shard_size)
    else:
        assert isinstance(max_shard_size, int), "only Transformers' own method has texts for sizes"
        _write_plain(model, state, folder, max_shard_size)


def _tensors_of_model(twin: Any, *, merged: Callable[[Any], Any] | None) -> dict[str, Tensor]:
    model = twin if merged is None else merged(twin)
    state: dict[str, Tensor] = model.state_dict()
    if not is_transformers_model(model):
        _refuse_extra_state(state)
        return state
    tied = _second_names(model, state)
    return as_in_checkpoint(model, {n: t for n, t in state.items() if n not in tied})


def _copy_own_ties(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy the second tensor of each tie that `from_pretrained` will not make again.

    Transformers omits the second name of every tie that a class may have, even if the configuration has
    switched the tie off and the user has tied the weights by hand.
    """
    tied = _second_names(model, state)
    seen: set[int] = set()
    for name, tensor in state.items():
        if name in tied:
            continue
        if storage_id(tensor) in seen:
            state[name] = tensor.clone()
        seen.add(storage_id(tensor))


def _second_names(model: nn.Module, state: dict[str, Tensor]) -> set[str]:
    """Return the second name of each tie that `from_pretrained` makes again."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        second
        for second, first in ties.items()
        if second != first
        and {second, first} <= state.keys()
        and storage_id(state[second]) == storage_id(state[first])
    }


def _write_plain(
    model: nn.Module, state: dict[str, Any], folder: Path, max_shard_bytes: int
) -> None:
    """Write a model without a library under all names of its state dict, as `load_state_dict` takes them.

    safetensors' own functions would refuse a tied weight, or keep only one of its names.
    """
    _refuse_extra_state(state)
    shards = _shards(state, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else "model.safetensors"
        write_tensors(folder / file, shard, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        size = sum(tensor.nbytes for tensor in state.values())
        elements = sum(parameter.numel() for parameter in model.parameters())
        index = {
            "metadata": {"total_parameters": elements, "total_size": size},
            "weight_map": weight_map,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _refuse_extra_state(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise FcdpError(
                f"{name!r} of the model's state dict is a {type(value).__name__}, and a safetensors file "
                "holds only tensors; leave it out of get_extra_state"
            )


def _shards(state: dict[str, Tensor], max_shard_bytes: int) -> list[dict[str, Tensor]]:
    """Divide tensors, in their order, into shards; only a shard of a single tensor may exceed the limit."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in state.items():
        size = sum(t.nbytes for t in shards[-1].values())
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _refuse_to_merge(root: Any) -> None:
    if base_of(root) is root:
        raise FcdpError(
            f"merge=True merges adapters into their base, and {type(root).__name__} is not a PEFT model; "
            "leave it out"
        )
    if not hasattr(root.base_model, "merge_and_unload"):
        kinds = {config.peft_type.value for config in root.peft_config.values()}
        raise FcdpError(
            f"adapters of type {', '.join(sorted(kinds))} do not change the base's weights, so they cannot "
            "be merged; save the adapter itself, without merge=True (stream_state: only='adapters')"
        )
    unable = import_module("peft.tuners.tuners_utils").BaseTunerLayer.merge
    plain_soon = {layer for _, layer, _ in quantised_layers(root)}
    for name, module in root.named_modules():
        if module._modules.get("base_layer") in plain_soon:
            continue  # PEFT will choose its class again
        if is_adapter_layer(module) and type(module).merge is unable:
            raise FcdpError(
                f"PEFT cannot merge {type(module).__name__} at {name}; save the adapter itself, without "
                "merge=True (stream_state: only='adapters')"
            )


# --- adapters ---------------------------------------------------------------------------------------------


def _active_adapter(root: Any) -> str:
    active = list(root.active_adapters)
    if len(active) != 1:
        raise FcdpError(
            f"only='adapters' streams one adapter, and {len(active)} are active ({', '.join(active)}); make "
            "one active with set_adapter"
        )
    name: str = active[0]
    return name


def _tensors_of_adapter(twin: Any, *, name: str) -> dict[str, Tensor]:
    read = import_module("peft").get_peft_model_state_dict
    tensors: dict[str, Tensor] = read(twin, adapter_name=name)
    return tensors


def _tensors_attached(twin: Any) -> dict[str, Tensor]:
    # Transformers puts the prefix before the names in its files.
    return {f"base_model.model.{n}": t for n, t in twin.get_adapter_state_dict().items()}


def _adapters(twin: Any) -> Iterable[Tensor]:
    for name in twin.peft_config:
        yield from _tensors_of_adapter(twin, name=name).values()


def _write_adapters(twin: Any, aside: Path, *, folder: Path) -> None:
    if (folder / "README.md").is_file():  # PEFT adds to it
        shutil.copyfile(folder / "README.md", aside / "README.md")
    twin.save_pretrained(str(aside))


def _write_attached(twin: Any, folder: Path) -> None:
    let_this_rank_save(twin)
    twin.save_pretrained(folder)


_PLAIN = (nn.Linear, nn.Embedding)


def quantised_layers(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The layers with quantised weights: their names, themselves, and the names of the weights in them."""
    return [
        (name, module, child)
        for name, module in root.named_modules()
        for child, weight in module.named_children()
        if isinstance(weight, QuantisedWeight)
    ]


def _refuse_unknown(layers: Iterable[tuple[str, nn.Module, str]]) -> None:
    """Refuse to dequantise layers for which torch has no plain layer."""
    for name, module, _ in layers:
        if not isinstance(module, _PLAIN):
            raise FcdpError(
                f"{name} is a quantised {type(module).__name__}, and fcdp dequantises only linear layers and "
                "embeddings; save the adapter itself, without merge=True"
            )


def _dense_bytes(root: nn.Module, layers: Iterable[tuple[str, Any, str]]) -> int:
    """The bytes of all quantised weights once they are dequantised."""
    itemsize = (dtype_of(base_of(root)) or torch.float32).itemsize
    return itemsize * sum(
        layer.in_features * layer.out_features
        if isinstance(layer, nn.Linear)
        else layer.num_embeddings * layer.embedding_dim
        for _, layer, _ in layers
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
