"""Everything that is read from Transformers and PEFT, whose names differ between versions.

This module imports neither: a model of theirs has imported them, and no other model needs them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fcdp_compile.errors import FcdpError


def is_transformers_model(module: nn.Module) -> bool:
    """Whether a module is a `PreTrainedModel` of Transformers."""
    return _is_a(module, "transformers.modeling_utils", "PreTrainedModel")


def is_library_save(method: Callable[..., Any]) -> bool:
    """Whether a function is the save_pretrained that Transformers or PEFT gives to its models."""
    owners = (
        ("transformers.modeling_utils", "PreTrainedModel"),
        ("peft.peft_model", "PeftModel"),
    )
    classes = [getattr(sys.modules.get(home), name, None) for home, name in owners]
    return any(method is getattr(kind, "save_pretrained", None) for kind in classes)


def let_this_rank_save(model: nn.Module) -> None:
    """Let a Transformers model write on any rank that calls its `save_pretrained`.

    Otherwise it writes only on global rank 0 (5.23), and silently nothing if a mesh lacks that rank.
    """
    if hasattr(model, "should_save_on_this_rank"):
        vars(model)["should_save_on_this_rank"] = lambda is_main_process: is_main_process


def as_in_checkpoint(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a Transformers model under the names, and cut as, its `save_pretrained` writes them.

    Such as a tensor for each expert, where the model has a tensor for all experts.
    """
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    revert: Callable[[nn.Module, dict[str, Tensor]], dict[str, Tensor]] | None = getattr(
        sys.modules.get("transformers.core_model_loading"), "revert_weight_conversion", None
    )
    if revert is None:
        raise FcdpError(
            "this version of transformers does not say how it converts checkpoints back "
            "(core_model_loading.revert_weight_conversion); install transformers>=5.0"
        )
    return revert(model, {name: t for name, t in state.items() if name not in ignored})


def dtype_of(base: nn.Module) -> torch.dtype | None:
    """The dtype that `from_pretrained` casts weights to, as the config says; None without a config."""
    dtype = getattr(getattr(base, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def base_of(root: nn.Module) -> nn.Module:
    """Return the model that PEFT has wrapped, or the given model if it is not wrapped."""
    if _is_a(root, "peft.peft_model", "PeftModel"):
        base: nn.Module = root.get_base_model()  # type: ignore[operator]  # typed as a tensor
        return base
    if _is_a(root, "peft.mixed_model", "PeftMixedModel"):
        mixed: nn.Module = root.base_model.model  # type: ignore[assignment,union-attr]  # typed as a tensor
        return mixed
    return root


def has_adapters(root: nn.Module) -> bool:
    """Whether a model has PEFT's adapters, by PEFT's wrapper or by Transformers' `add_adapter`."""
    return base_of(root) is not root or has_attached_adapters(root)


def has_attached_adapters(root: nn.Module) -> bool:
    """Whether Transformers has put adapters into a model that PEFT has not wrapped."""
    return bool(getattr(root, "_hf_peft_config_loaded", False))


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether a module wraps another, its child `base_layer`, and adds adapters as its other children."""
    return _is_a(module, "peft.tuners.tuners_utils", "BaseTunerLayer")


def is_trained_copy(module: nn.Module) -> bool:
    """Whether a module wraps another, its child `original_module`, and trains copies in `modules_to_save`."""
    return _is_a(module, "peft.utils.other", "AuxiliaryTrainingWrapper")


def transposed_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that a quantised layer had before Transformers replaced it, if its weight was [in, out]."""
    kind = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    source: Any = getattr(module, "source_cls", None)
    return source if kind and isinstance(source, type) and issubclass(source, kind) else None


def _is_a(module: nn.Module, home: str, name: str) -> bool:
    kind = getattr(sys.modules.get(home), name, None)
    return isinstance(kind, type) and isinstance(module, kind)


def ignored_patterns(base: nn.Module) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return the patterns of missing names, and of unexpected names, that `from_pretrained` ignores."""
    missing = set(getattr(base, "_keys_to_ignore_on_load_missing", None) or ())
    unexpected = set(getattr(base, "_keys_to_ignore_on_load_unexpected", None) or ())
    if is_transformers_model(base):
        # Buffers that older checkpoints hold and newer models compute, as Transformers lists them.
        buffers = [name for name, _ in base.named_buffers()]
        if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
            unexpected.add(r"rotary_emb\.inv_freq")
        if any(name.endswith("position_ids") for name in buffers):
            unexpected.add(r"(^|\.)position_ids$")
    return _any_of(missing), _any_of(unexpected)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    # Without patterns: one that matches nothing.
    return re.compile("|".join(f"({pattern})" for pattern in sorted(patterns)) or r"(?!)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """The new name of a name in a file.

    name: the name in the model, or the first of the names that a converter makes from the name in the file.
    converter: Transformers' WeightConverter for its tensor, or None; pattern: the converter's source pattern
    that matched.
    """

    name: str
    converter: Any | None = None
    pattern: str = ""


class Renaming:
    """Transformers' rules for a model: how names and tensors of its checkpoints become the model's."""

    def __init__(self, base: nn.Module) -> None:
        self.base = base
        self.prefix: str = getattr(base, "base_model_prefix", "") or ""
        self.rules = _rules(base)
        converter = getattr(
            sys.modules.get("transformers.core_model_loading"), "WeightConverter", ()
        )
        self._converters = [rule for rule in self.rules if isinstance(rule, converter)]
        self._renamings = [rule for rule in self.rules if not isinstance(rule, converter)]

    def of(self, name: str, known: Container[str]) -> Renamed:
        """Return the new name of a name in a file, given the model's names; call it in `reading_order`."""
        renamed = self._ruled(name, known)
        if renamed.name not in known and name in known:
            return Renamed(name=name)
        return renamed

    def _ruled(self, name: str, known: Container[str]) -> Renamed:
        now = name
        for rule in self._renamings:
            now, _ = rule.rename_source_key(now)
        for converter in self._converters:
            now, pattern = converter.rename_source_key(now)
            if pattern is not None:
                return Renamed(
                    name=self._prefixed(now, known), converter=converter, pattern=pattern
                )
        return Renamed(name=self._prefixed(now, known))

    def _prefixed(self, name: str, known: Container[str]) -> str:
        """Return the name with or without the prefix of the model under the head, as the model has it."""
        if not self.prefix:
            return name
        start = f"{self.prefix}."
        if name.startswith(start) and name.removeprefix(start) in known:
            return name.removeprefix(start)
        return start + name if start + name in known else name

    def is_of_head(self, name: str) -> bool:
        """Whether a name of the model belongs to the head that sits on its base model."""
        has_base = bool(self.prefix) and isinstance(self.base._modules.get(self.prefix), nn.Module)
        return has_base and not name.startswith(f"{self.prefix}.")

    def is_foreign_head(self, name: str, names: Iterable[str]) -> bool:
        """Whether a tensor that the model lacks belongs to another head; names: all of the checkpoint's."""
        if not self.prefix:
            return False
        start = f"{self.prefix}."
        return not name.startswith(start) and any(n.startswith(start) for n in names)

    def note_used(self) -> None:
        """Record in the model which rules its checkpoint needed, as `from_pretrained` does.

        Its `save_pretrained` then writes the names and tensors that the checkpoint had.
        """
        if is_transformers_model(self.base):
            used = [rule for rule in self.rules if rule.was_used()]
            self.base._weight_conversions = used  # type: ignore[assignment]  # typed as a tensor


def _rules(base: nn.Module) -> list[Any]:
    if not is_transformers_model(base):
        return []
    find: Callable[[nn.Module], list[Any]] | None = getattr(
        sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None
    )
    if find is None:
        raise FcdpError(
            "this version of transformers does not say how it converts checkpoints "
            "(conversion_mapping.get_model_conversion_mapping); install transformers>=5.0"
        )
    return find(base)


def reading_order(name: str) -> list[tuple[int, int | str, int]]:
    """Return a sort key for Transformers' order of names, numbers by value: experts stack in this order."""
    parts: list[tuple[int, int | str, int]] = []
    for part in name.split("."):
        if part.isdigit():
            parts.append((0, int(part), -1))
        else:
            text = part.rstrip("0123456789")
            digits = part[len(text) :]
            parts.append((1, text, int(digits) if digits else -1))
    return parts


# --- the tensors of a model, and their names in checkpoints ------------------------------------------------
#
#     base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight      the wrapped model's name
#                      model.layers.0.self_attn.q_proj.weight                 the checkpoint's
#
# PEFT's wrappers are recognised by their classes: any module may be called `base_layer`.


class Role(Enum):
    """The role of a tensor in a model that may be wrapped by PEFT.

    COPY: of a module of the base; PEFT trains the copy in its place (`modules_to_save`).
    """

    BASE = "base"
    COPY = "copy"
    ADAPTER = "adapter"


class Entry(NamedTuple):
    """One name of a model's state dict.

    name: the name in the root's state dict; for a parameter it is a name of `named_parameters`, tied ones
    included.
    plain: the name in a checkpoint of the base; for an adapter equal to `name`.
    module, leaf: where it is.  tensor: the parameter or buffer itself; a tied one has several entries.
    """

    name: str
    plain: str
    role: Role
    module: nn.Module
    leaf: str
    tensor: Tensor


def entries_of(root: nn.Module) -> list[Entry]:
    """Return every parameter and persistent buffer of a model, in the order of its state dict, not gathered.

    Raises: FcdpError for a state dict with something else in it.
    """
    places = {place.path: place for place in _walk(root, base_of(root))}
    # keep_vars returns the parameters themselves: no home shard is touched.
    state = root.state_dict(keep_vars=True)
    found = []
    for name in state:
        path, _, leaf = name.rpartition(".")
        if (place := places.get(path)) is None or (tensor := place.tensors.get(leaf)) is None:
            raise FcdpError(
                f"{name!r} of the model's state dict is not a parameter or buffer of its modules (extra "
                "state, or a hook that renames), which a safetensors checkpoint cannot carry"
            )
        plain = name if place.role is Role.ADAPTER else f"{place.plain}.{leaf}".removeprefix(".")
        found.append(Entry(name, plain, place.role, place.module, leaf, tensor))
    return found


def adapter_tensors(root: nn.Module) -> Iterator[Tensor]:
    """Yield all tensors that PEFT has added to a base: adapters, trained copies, prompt encoders."""
    of_base: set[int] = set()
    added: list[Tensor] = []
    for place in _walk(root, base_of(root)):
        if place.role is Role.BASE:
            of_base |= {id(tensor) for tensor in place.tensors.values()}
        else:
            added += place.tensors.values()
    # A prompt encoder also refers to the base's embedding.
    return (tensor for tensor in added if id(tensor) not in of_base)


class _Place(NamedTuple):
    """A module at a path, the checkpoints' name for that path, and the role of the module's own tensors."""

    path: str
    module: nn.Module
    plain: str
    role: Role

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The module's own parameters and buffers, by name."""
        named = (*self.module._parameters.items(), *self.module._buffers.items())
        return {name: tensor for name, tensor in named if tensor is not None}


def _walk(root: nn.Module, base: nn.Module) -> Iterator[_Place]:
    """Yield the place of every path to a module."""
    # Outside of a wrapped base, all modules are adapters (prompt encoders).
    waiting = [_Place("", root, "", Role.BASE if base is root else Role.ADAPTER)]
    while waiting:
        place = waiting.pop()
        if place.module is base:
            place = place._replace(plain="", role=Role.BASE)
        has_adapters = place.role is Role.BASE and is_adapter_layer(place.module)
        yield place._replace(role=Role.ADAPTER) if has_adapters else place
        for name, child in place.module._modules.items():
            if child is not None:
                waiting += _below(place, name, child)


def _below(place: _Place, name: str, child: nn.Module) -> list[_Place]:
    """Return the place of a child; for a dictionary of copies, the places of the copies."""
    path, plain = (f"{above}.{name}".removeprefix(".") for above in (place.path, place.plain))
    if place.role is Role.BASE and is_adapter_layer(place.module):
        if name == "base_layer":
            return [_Place(path, child, place.plain, Role.BASE)]
        return [_Place(path, child, plain, Role.ADAPTER)]
    if place.role is Role.BASE and is_trained_copy(place.module):
        if name == "original_module" or is_adapter_layer(child):
            return [_Place(path, child, place.plain, Role.BASE)]
        copies = [(f"{path}.{n}", c) for n, c in child._modules.items() if c is not None]
        return [_Place(at, copy, place.plain, Role.COPY) for at, copy in copies]
    return [_Place(path, child, plain, place.role)]
