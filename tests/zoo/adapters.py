"""Ways to train a model: whole, or with the adapters of PEFT; and changes of adapters between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn

Adapt = Callable[[nn.Module, tuple[str, ...]], nn.Module]
"""Makes the model to train from a base model and the names of its linear modules."""

Act = Callable[[Any], Any]
"""Changes a model between two steps; returns the model to train on, or None for the given model."""


def whole(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    """Every parameter is trained."""
    return base


def _lora(targets: tuple[str, ...], **more: Any) -> peft.LoraConfig:
    # PEFT initialises B with zeros by default, so that every gradient of A is zero.
    return peft.LoraConfig(
        r=6, lora_alpha=12, target_modules=list(targets), init_lora_weights=False, **more
    )


def lora(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    return peft.get_peft_model(base, _lora(targets))


def rslora(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    return peft.get_peft_model(base, _lora(targets, use_rslora=True))


def dora(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    return peft.get_peft_model(base, _lora(targets, use_dora=True))


def lora_and_whole_head(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    """LoRA, and a head and an embedding that are trained whole."""
    return peft.get_peft_model(base, _lora(targets, modules_to_save=["lm_head", "embed_tokens"]))


def ia3(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    config = peft.IA3Config(
        target_modules=list(targets), feedforward_modules=[t for t in targets if "down" in t]
    )
    return peft.get_peft_model(base, config)


def adalora(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    """The ranks shrink from step 1 on, and are final in step 4."""
    config = peft.AdaLoraConfig(
        init_r=6,
        target_r=3,
        tinit=1,
        tfinal=2,
        total_step=6,
        target_modules=list(targets),
        deltaT=1,
    )
    return peft.get_peft_model(base, config)


def allocate(model: Any, step: int) -> None:
    """AdaLoRA's own work in each step, before the gradients are dropped."""
    model.base_model.update_and_allocate(step)


def prompt_tuning(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    return peft.get_peft_model(base, config)


def prefix_tuning(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    return peft.get_peft_model(base, config)


def two_adapters(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    """Adapters "default" and "other"; the first is active."""
    model = peft.get_peft_model(base, _lora(targets))
    model.add_adapter("other", _lora(targets[:2]))
    return model


def both_active(base: nn.Module, targets: tuple[str, ...]) -> nn.Module:
    """Two adapters that are trained together."""
    model = two_adapters(base, targets)
    model.base_model.set_adapter(["default", "other"])
    return model


# --- between two steps -------------------------------------------------------------------------------------


def switch_to(adapter: str) -> Act:
    def act(model: Any) -> None:
        model.set_adapter(adapter)

    return act


def delete(adapter: str) -> Act:
    def act(model: Any) -> None:
        model.delete_adapter(adapter)

    return act


def merge(model: Any) -> None:
    """Merge the adapter into the base; the adapter is then unused, so nothing trains."""
    model.merge_adapter()


def unmerge(model: Any) -> None:
    model.unmerge_adapter()


def merge_and_start_anew(model: Any) -> None:
    """As ReLoRA does: merge the adapter into the base, and reset the adapter to zero."""
    model.merge_adapter()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                module.merged_adapters.clear()
                for parameter in module.lora_B.parameters():
                    parameter.zero_()


def merge_and_unload(model: Any) -> Any:
    """Merge the adapter, drop it, and train the whole base."""
    base = model.merge_and_unload()
    return base.requires_grad_(True)


def unfreeze_all(model: Any) -> None:
    model.requires_grad_(True)
