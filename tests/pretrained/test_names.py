"""A checkpoint's names for the tensors of models that PEFT has wrapped, and of models that only look so."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.models.pretrained.huggingface import Role, entries_of
from tests.distributed.models import llama

PREFIX = "base_model.model."
HEAD = "base_model.model.lm_head"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
EMBEDDING = "base_model.model.model.embed_tokens"


def _entries(root: nn.Module) -> dict[str, tuple[str, Role]]:
    return {entry.name: (entry.plain, entry.role) for entry in entries_of(root)}


def _adapter(name: str) -> dict[str, tuple[str, Role]]:
    return {name: (name, Role.ADAPTER)}


@pytest.mark.parametrize(
    ("config", "some"),
    [
        (
            peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
            {
                f"{QUERY}.base_layer.weight": ("model.layers.0.self_attn.q_proj.weight", Role.BASE),
                **_adapter(f"{QUERY}.lora_A.default.weight"),
                f"{HEAD}.original_module.weight": ("lm_head.weight", Role.BASE),
                f"{HEAD}.modules_to_save.default.weight": ("lm_head.weight", Role.COPY),
            },
        ),
        (
            peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1]),
            {
                f"{EMBEDDING}.token_adapter.base_layer.weight": (
                    "model.embed_tokens.weight",
                    Role.BASE,
                ),
                **_adapter(f"{EMBEDDING}.token_adapter.trainable_tokens_delta.default"),
            },
        ),
        (
            peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
            {
                "base_model.lm_head.weight": ("lm_head.weight", Role.BASE),
                **_adapter("prompt_encoder.default.embedding.weight"),
            },
        ),
        (
            peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
            {
                f"{QUERY}.base_layer.weight": ("model.layers.0.self_attn.q_proj.weight", Role.BASE),
                **_adapter(f"{QUERY}.ia3_l.default"),
            },
        ),
    ],
)
def test_wrapped_models(config: peft.PeftConfig, some: dict[str, tuple[str, Role]]) -> None:
    base = llama()
    plain = set(base.state_dict())
    found = _entries(peft.get_peft_model(base, config))
    assert {name: found[name] for name in some} == some
    assert {p for p, role in found.values() if role is Role.BASE} == plain


class Misleading(nn.Module):
    """A model with PEFT's names, but not PEFT's classes."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(2, 2)})
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("passing", torch.zeros(1), persistent=False)


def test_names_alone_mean_nothing() -> None:
    model = Misleading()
    assert _entries(model) == {name: (name, Role.BASE) for name in model.state_dict()}


class WithExtra(nn.Linear):
    def get_extra_state(self) -> object:
        return {"x": 1}

    def set_extra_state(self, state: object) -> None:
        pass


def test_extra_state_is_refused() -> None:
    with pytest.raises(FcdpError, match=r"'0\._extra_state' of the model's state dict"):
        entries_of(nn.Sequential(WithExtra(2, 2)))
