"""What the base of a PEFT model comes to with its active adapters merged into it.

PEFT merges one layer at a time, and so it does here: into a twin of the one layer, with whole parameters,
on the CPU of the writer.  The model itself is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.files.safetensors_writer import TensorMeta
from fcdp_compile.pretrained.exporting.contents import Contents, Leaves, plain_contents
from fcdp_compile.pretrained.exporting.transformers_contents import transformers_contents
from fcdp_compile.pretrained.exporting.twin import Twins
from fcdp_compile.pretrained.exporting.whole_values import WholeValues
from fcdp_compile.pretrained.huggingface import is_adapter_layer, is_transformers_model
from fcdp_compile.torch_compat import storage_id


def merged_contents(model: Any, leaves: Leaves, max_shard_bytes: int) -> Contents:
    """Of a PEFT model: its base as `merge_and_unload` leaves it.

    Raises: FcdpError for adapters that are no change of the base's weights, such as prompts.
    """
    layers = _mergeable(model)
    twin: Any = Twins(lambda tensor: leaves.of("a tensor of PEFT's", tensor)).of(model)
    twin.base_model._check_merge_allowed()
    base: Any = twin.base_model.unload()
    state = _with_merged(base, layers, leaves)
    if not is_transformers_model(base):
        return plain_contents(base, leaves.tape, state, max_shard_bytes)
    _note_untied(base)
    return transformers_contents(base, leaves.tape, state, max_shard_bytes)


class Merging:
    """Layers that change the tensors of one module, in the order in which PEFT merges them.

    parts: of the module, by their names in its state dict.
    """

    def __init__(self, leaves: Leaves, parts: list[str]) -> None:
        self._leaves = leaves
        self._parts = parts
        self._layers: list[Any] = []
        self._waiting: dict[str, Tensor | None] = {}

    def add(self, layer: nn.Module) -> None:
        """Merge another layer, after those before."""
        if all(layer is not other for other in self._layers):
            self._layers.append(layer)

    def whole(self, part: str, values: WholeValues) -> Tensor | None:
        """One of the parts, merged; as `Source.whole`."""
        # The parts are neighbours in a file, and merged once for all of them.
        if part not in self._waiting:
            self._waiting = self._merged(values)
        return self._waiting.pop(part)

    def _merged(self, values: WholeValues) -> dict[str, Tensor | None]:
        gathered = {
            id(tensor): self._leaves.source("a tensor of PEFT's", tensor).whole(values)
            for tensor in _tensors_of(self._layers)
        }
        merged: dict[str, Tensor | None] = dict.fromkeys(self._parts)

        def merge() -> None:
            twins = Twins(lambda tensor: _there(gathered[id(tensor)]))
            first, *_ = [_merged_module(twins.of(layer)) for layer in self._layers]
            merged.update({n: t for n, t in first.state_dict().items() if n in merged})

        if values.is_writer:
            values.attempt(merge)
        return merged


def _tensors_of(layers: list[nn.Module]) -> list[Tensor]:
    """Every parameter and buffer that layers have or refer to, once."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    twins = Twins(note)
    for layer in layers:
        twins.of(layer)
    return found


def _there(value: Tensor | None) -> Tensor:
    assert value is not None, "a layer is merged only where its tensors were gathered"
    return value


def _merged_module(layer: Any) -> nn.Module:
    if hasattr(layer, "unload_and_optionally_merge_module"):
        module: nn.Module = layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
        return module
    layer.merge(safe_merge=False, adapter_names=None)
    base: nn.Module = layer.get_base_layer()
    return base


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OfMerged:
    """One tensor of what layers are merged into."""

    merging: Merging
    part: str

    def whole(self, values: WholeValues) -> Tensor | None:
        """As `Source` says."""
        return self.merging.whole(self.part, values)


def _mergeable(model: Any) -> dict[str, nn.Module]:
    """By their names in the base, the layers that change weights of the base when they are merged."""
    unable = import_module("peft.tuners.tuners_utils").BaseTunerLayer.merge
    kinds = {config.peft_type.value for config in model.peft_config.values()}
    prompts = any(config.is_prompt_learning for config in model.peft_config.values())
    if prompts or not hasattr(model.base_model, "unload"):
        raise FcdpError(
            f"adapters of type {', '.join(sorted(kinds))} are no change of the base's weights and cannot be "
            "merged; save the adapter itself, without merge=True"
        )
    layers: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.base_model.model.named_modules():
        is_layer = is_adapter_layer(module) or hasattr(module, "unload_and_optionally_merge_module")
        if not is_layer or name.startswith(inside or "."):
            continue
        inside = (*inside, f"{name}.")
        within = [m for m in module.modules() if is_adapter_layer(m)]
        if stuck := next((m for m in within if type(m).merge is unable), None):
            raise FcdpError(
                f"PEFT cannot merge {type(stuck).__name__}, which wraps {name}; save the adapter itself, "
                "without merge=True"
            )
        if within:  # others hold a trained copy, which takes the place of what it was copied from
            layers[name] = module
    return layers


def _with_merged(base: Any, layers: dict[str, nn.Module], leaves: Leaves) -> dict[str, Tensor]:
    """The leaves of the unwrapped base: those of merged modules stand for what they are merged to."""
    by_storage: dict[int, tuple[Merging, Tensor]] = {}
    for name, layer in layers.items():
        tensors: dict[str, Tensor] = base.get_submodule(name).state_dict(keep_vars=True)
        # Two layers may wrap modules with one weight.
        known = next(
            (by_storage[s][0] for t in tensors.values() if (s := storage_id(t)) in by_storage), None
        )
        merging = known or Merging(leaves, list(tensors))
        merging.add(layer)
        for part, tensor in tensors.items():
            if storage_id(tensor) not in by_storage:
                meta = TensorMeta(dtype=tensor.dtype, shape=tuple(tensor.shape))
                leaf = leaves.tape.leaf(OfMerged(merging=merging, part=part), meta)
                by_storage[storage_id(tensor)] = (merging, leaf)
    state: dict[str, Tensor] = {}
    same: dict[int, Tensor] = {}
    for name, tensor in base.state_dict(keep_vars=True).items():
        storage = storage_id(tensor)
        leaf = by_storage[storage][1] if storage in by_storage else tensor.detach()
        if not leaves.tape.knows(leaf):
            raise FcdpError(f"PEFT makes {name!r} of the base of something that fcdp cannot gather")
        state[name] = same.setdefault(storage, leaf)
    return state


def _note_untied(base: Any) -> None:
    """Let the configuration say so where embeddings were tied and are two now, as merging in PEFT does."""
    if not getattr(base.config, "tie_word_embeddings", False):
        return
    ends = [base.get_input_embeddings(), base.get_output_embeddings()]
    weights = [getattr(end, "weight", None) for end in ends]
    storages = {storage_id(weight) for weight in weights if weight is not None}
    if None not in weights and len(storages) > 1:
        base.config.tie_word_embeddings = False
