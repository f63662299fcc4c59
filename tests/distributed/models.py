"""Small models of the kinds that users train, each with a function that makes its batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import peft
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.device.choice import seeded

VOCABULARY = 199


class Odd(nn.Module):
    """Sizes that ranks do not divide, a scalar, an empty parameter, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 7)
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 7)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 5))

        self.checkpointing = False

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        if self.checkpointing:
            hidden = checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = self.block(hidden)
        return self.norm(hidden) @ self.embedding.weight.t() + self.nothing.sum()

    def block(self, hidden: Tensor) -> Tensor:
        return hidden + self.second(nn.functional.gelu(self.first(hidden))) * self.scale


class Broken(Odd):
    """A graph break in the middle; some parameters are used on both sides of it."""

    def block(self, hidden: Tensor) -> Tensor:
        hidden = super().block(hidden)
        torch._dynamo.graph_break()
        return super().block(hidden)


class Floats(nn.Module):
    """Floating point inputs, and a buffer that keeps its dtype if parameters are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 11), nn.SiLU(), nn.Linear(11, 3))
        self.register_buffer("mean", torch.full((5,), 0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs - self.mean.to(inputs.dtype))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its loss; `loss(model, ids)` with ids of shape [batch, length]."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Tensor], Tensor]
    vocabulary: int


def _language_loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _odd_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _floats_loss(model: nn.Module, ids: Tensor) -> Tensor:
    inputs = torch.stack([(ids * k).sin() for k in range(1, 6)], -1)
    return model(inputs).float().square().mean()


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            intermediate_size=100,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def gpt2(dropout: float = 0.0) -> nn.Module:
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=48,
            n_layer=2,
            n_head=4,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
        )
    )
    model.loss_type = "ForCausalLM"  # without it, a warning in the forward breaks the graph
    return model


def gpt2_dropout() -> nn.Module:
    return gpt2(dropout=0.1)


def checkpointing(model: nn.Module) -> nn.Module:
    """Recompute the model's blocks in the backward, without reentrant autograd; returns the model."""
    for module in model.modules():
        if isinstance(module, Odd):
            module.checkpointing = True
        elif isinstance(module, PreTrainedModel):
            module.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def with_lora(base: nn.Module, *targets: str) -> nn.Module:
    config = peft.LoraConfig(
        r=8, lora_alpha=16, target_modules=list(targets), init_lora_weights=False
    )
    adapted: nn.Module = peft.get_peft_model(base, config)
    return adapted


def llama_lora() -> nn.Module:
    return with_lora(llama(), "q_proj", "k_proj", "v_proj", "o_proj")


def gpt2_lora() -> nn.Module:
    return with_lora(gpt2(), "c_attn", "c_proj")


def odd_lora() -> nn.Module:
    return with_lora(Odd(), "first", "second")


CASES: dict[str, Case] = {
    "broken": Case(model=Broken, loss=_odd_loss, vocabulary=17),
    "floats": Case(model=Floats, loss=_floats_loss, vocabulary=17),
    "odd": Case(model=Odd, loss=_odd_loss, vocabulary=17),
    "odd-lora": Case(model=odd_lora, loss=_odd_loss, vocabulary=17),
    "llama": Case(model=llama, loss=_language_loss, vocabulary=VOCABULARY),
    "llama-lora": Case(model=llama_lora, loss=_language_loss, vocabulary=VOCABULARY),
    "gpt2": Case(model=gpt2, loss=_language_loss, vocabulary=VOCABULARY),
    "gpt2-dropout": Case(model=gpt2_dropout, loss=_language_loss, vocabulary=VOCABULARY),
    "gpt2-lora": Case(model=gpt2_lora, loss=_language_loss, vocabulary=VOCABULARY),
}


def batch(case: Case, *, step: int, rank: int, size: int = 2, length: int = 16) -> Tensor:
    """The ids that `rank` trains on in `step`; equal in every process."""
    generator = seeded(1000 * step + rank)
    return torch.randint(0, case.vocabulary, (size, length), generator=generator)
