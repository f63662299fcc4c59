"""Find the initialisations of a model's modules, in the order in which its constructors run them.

An ordinary build draws a module's values in its constructor, children first, and a Hugging Face model draws
those of all its modules once more when it is complete, by its `_init_weights`.  Run again in this order on
tensors of the same device, both give the same values, bit for bit.  Adapters of PEFT are made after the model
that they adapt, one adapter after the other.

Neither transformers nor peft is imported: modules are recognised by the attributes of their classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fcdp_compile.errors import FcdpError


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One initialisation: its module, its name for messages, and the call."""

    module: nn.Module
    what: str
    act: Callable[[], object]


def steps_of(root: nn.Module) -> list[Step]:
    """Every initialisation of the model in the order of an ordinary build.

    Raises: FcdpError for adapters whose values are computed from values of the adapted model.
    """
    return _Build(root).steps


def tied_to_others(root: nn.Module) -> set[tuple[nn.Module, str]]:
    """The places that a Hugging Face model ties to another place, whose values both then have."""
    found = set()
    for module in root.modules():
        tied = vars(module).get("all_tied_weights_keys")
        if _is_pretrained(module) and isinstance(tied, dict):
            for target in tied:
                path, _, name = str(target).rpartition(".")
                found.add((module.get_submodule(path), name))
    return found


class _Build:
    """Visits a model's modules in the order of their constructors."""

    def __init__(self, root: nn.Module) -> None:
        self._names: dict[nn.Module, str] = {}
        for name, module in root.named_modules():
            self._names.setdefault(module, name)
        self._configs = _adapter_configs(root)
        self._built: set[nn.Module] = set()
        self._initialised: set[nn.Module] = set()
        self.steps: list[Step] = []
        self._build(root)
        self._add_adapters(root)

    def _add(self, module: nn.Module, how: str, act: Callable[[], object]) -> None:
        where = self._names.get(module) or "the model"
        self.steps.append(Step(module=module, what=f"{how} of {where}", act=act))

    def _build(self, module: nn.Module) -> None:
        if module in self._built:
            return
        self._built.add(module)
        for child in _children(module):
            self._build(child)
        self._construct(module)
        if _is_pretrained(module):
            for inner in _inside_out(module):
                if inner not in self._initialised:
                    self._initialised.add(inner)
                    initialise: Any = module._init_weights
                    what = f"{type(module).__name__}._init_weights"
                    self._add(inner, what, partial(initialise, inner))

    def _construct(self, module: nn.Module) -> None:
        """Add the method by which the module's constructor sets its parameters, under its usual names."""
        for name in ("reset_parameters", "_reset_parameters"):
            method = getattr(type(module), name, None)
            if method is not None and _takes_only_self(method):
                self._add(module, f"{type(module).__name__}.{name}", getattr(module, name))
                return

    # --- PEFT ---------------------------------------------------------------------------------------------

    def _add_adapters(self, root: nn.Module) -> None:
        layers = [m for m in root.modules() if _is_adapted(m)]
        adapters = dict.fromkeys(name for layer in layers for name in _adapters(layer))
        for adapter in adapters:
            for layer in layers:
                if adapter in _adapters(layer):
                    self._add_adapter(layer, adapter)
        for module in root.modules():
            if _keeps_copies(module):
                for copy in module.modules_to_save.children():  # type: ignore[union-attr]  # a ModuleDict
                    act = partial(_copy, copy, module.original_module)
                    self._add(module, "the copy to be saved", act)

    def _add_adapter(self, layer: nn.Module, adapter: str) -> None:
        of: Any = layer
        kind = type(layer)
        for container in _containers(layer):
            if isinstance(container, nn.ModuleDict) and adapter in container:
                self._build(container[adapter])
        if hasattr(kind, "reset_lora_parameters"):
            start = partial(
                of.reset_lora_parameters, adapter, self._how_lora_starts(layer, adapter)
            )
            self._add(layer, f"{kind.__name__}.reset_lora_parameters", start)
            magnitudes = getattr(of, "lora_magnitude_vector", {})
            if adapter in magnitudes and adapter in of.lora_A:
                magnitude = magnitudes[adapter]

                def update() -> None:
                    magnitude.update_layer(
                        base_layer=of.get_base_layer(),
                        lora_A=of.lora_A[adapter].weight,
                        lora_B=of.lora_B[adapter].weight,
                        scaling=of.scaling[adapter],
                    )

                self._add(magnitude, f"{type(magnitude).__name__}.update_layer", update)
        elif hasattr(kind, "reset_ia3_parameters"):
            start = partial(of.reset_ia3_parameters, adapter)
            self._add(layer, f"{kind.__name__}.reset_ia3_parameters", start)

    def _how_lora_starts(self, layer: nn.Module, adapter: str) -> bool | str:
        config = self._configs.get(adapter)
        how = getattr(config, "init_lora_weights", True)
        if isinstance(how, bool) or str(how).lower() == "gaussian":
            return how
        raise FcdpError(
            f"adapter {adapter!r} of {self._names[layer]} has init_lora_weights={how!r}, which computes "
            "it from the values of the adapted model; build the model with its values before "
            "fcdp_compile.shard, or use init_lora_weights=True"
        )


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """The children that a module's constructor made: not adapters, nor copies that adapters keep."""
    later: set[nn.Module] = set(_containers(module)) if _is_adapted(module) else set()
    if _keeps_copies(module):
        later.add(module.modules_to_save)  # type: ignore[arg-type]  # a ModuleDict
    return (child for child in module.children() if child not in later)


def _inside_out(module: nn.Module) -> Iterator[nn.Module]:
    for child in _children(module):
        yield from _inside_out(child)
    yield module


def _is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a Hugging Face model, which initialises all modules in it."""
    return all(callable(getattr(type(module), n, None)) for n in ("_init_weights", "post_init"))


def _is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer of PEFT: a base layer and, in dictionaries by adapter, its adapters."""
    return hasattr(type(module), "adapter_layer_names") and "base_layer" in module._modules


def _containers(layer: nn.Module) -> list[nn.Module]:
    names: Any = layer.adapter_layer_names
    found = (layer._modules.get(name) for name in names)
    return [container for container in found if container is not None]


def _adapters(layer: nn.Module) -> list[str]:
    dicts = [c for c in _containers(layer) if isinstance(c, nn.ModuleDict | nn.ParameterDict)]
    return list(dict.fromkeys(name for container in dicts for name in container))


def _keeps_copies(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper of one that is trained and saved whole, in a copy by adapter."""
    return "original_module" in module._modules and isinstance(
        module._modules.get("modules_to_save"), nn.ModuleDict
    )


def _copy(copy: nn.Module, original: Any) -> None:
    values = [*original.parameters(), *original.buffers()]
    for ours, theirs in zip([*copy.parameters(), *copy.buffers()], values, strict=True):
        ours.detach().copy_(theirs.detach())


def _adapter_configs(root: nn.Module) -> dict[str, Any]:
    """The configurations of the adapters, by adapter.

    Raises: FcdpError for prompts that start from embeddings of words.
    """
    for module in root.modules():
        configs = vars(module).get("peft_config")
        if not isinstance(configs, dict):
            continue
        for adapter, config in configs.items():
            how = getattr(config, "prompt_tuning_init", None)
            if how is not None and getattr(how, "value", how) != "RANDOM":
                raise FcdpError(
                    f"adapter {adapter!r} has prompt_tuning_init={getattr(how, 'value', how)!r}, which needs "
                    "embeddings that have no values yet; build the model with its values before "
                    "fcdp_compile.shard, or use 'RANDOM'"
                )
        return dict(configs)
    return {}


def _takes_only_self(method: Callable[..., Any]) -> bool:
    try:
        inspect.signature(method).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def lost_attributes(root: nn.Module) -> list[str]:
    """Names of tensors on meta that are neither parameters nor buffers; no initialisation can reach them."""
    return [
        f"{path}.{name}" if path else name
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
