"""Small models of the architectures that users train, built from configs alone, each with its loss.

They have two layers, no dropout, and sizes that 4 ranks do not divide, if the architecture allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 131
LABELS = 5
_MELS, _FRAMES = 8, 16  # of Whisper's spectrograms; its encoder halves the frames

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 40,
    "intermediate_size": 76,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "output_router_logits": True}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model, its loss, and the names of the linear modules that get adapters.

    loss: takes the model and ids of shape [batch, length], and makes all inputs of the model from the ids.
    """

    title: str
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    targets: tuple[str, ...]


def language_loss(model: Any, ids: Tensor) -> Tensor:
    """The loss of a decoder that predicts the next token."""
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def padded_loss(model: Any, ids: Tensor) -> Tensor:
    """The loss of a decoder on rows of different lengths, padded at the left."""
    first = ids[:, :1] % 4  # how many tokens of each row are padding
    mask = (torch.arange(ids.shape[1]) >= first).long()
    labels = ids.masked_fill(mask == 0, -100)
    loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    return loss


def masked_loss(model: Any, ids: Tensor) -> Tensor:
    """The loss of an encoder that predicts the tokens themselves, with padding at the right."""
    length = ids.shape[1]
    mask = (torch.arange(length) < length - ids[:, :1] % 4).long()
    loss: Tensor = model(input_ids=ids, attention_mask=mask, labels=ids).loss
    return loss


def translation_loss(model: Any, ids: Tensor) -> Tensor:
    """The loss of an encoder and a decoder that repeats the text backwards."""
    loss: Tensor = model(input_ids=ids, labels=ids.flip(1), use_cache=False).loss
    return loss


def image_loss(model: Any, ids: Tensor) -> Tensor:
    """The loss of a classifier of images of shape [batch, 3, 16, 16]."""
    pixels = torch.stack([(ids[:, :16, None] * k + torch.arange(16)).sin() for k in (1, 2, 3)], 1)
    loss: Tensor = model(pixel_values=pixels, labels=ids[:, 0] % LABELS).loss
    return loss


def speech_loss(model: Any, ids: Tensor) -> Tensor:
    """The loss of transcribing a spectrogram of shape [batch, mels, frames]."""
    sounds = (ids[:, None, :_FRAMES] * torch.arange(1, _MELS + 1)[:, None]).float().sin()
    loss: Tensor = model(input_features=sounds, labels=ids, use_cache=False).loss
    return loss


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DECODER))


def mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_DECODER, sliding_window=8))


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**_DECODER, tie_word_embeddings=True)
    )


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_DECODER, head_dim=10))


def gemma2() -> nn.Module:
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**_DECODER, head_dim=10, sliding_window=8)
    )


def gemma3() -> nn.Module:
    config = transformers.Gemma3TextConfig(
        **_DECODER,
        head_dim=10,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.Gemma3ForCausalLM(config)


def phi3() -> nn.Module:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**_DECODER))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=40,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        word_embed_proj_dim=40,
        ffn_dim=76,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.0,
    )
    return transformers.OPTForCausalLM(config)


def mixtral(experts: str = "grouped_mm", count: int = 6, **more: Any) -> nn.Module:
    config = transformers.MixtralConfig(**_DECODER, **_EXPERTS | more, num_local_experts=count)
    config._experts_implementation = experts
    return transformers.MixtralForCausalLM(config)


def mixtral_without_router_loss() -> nn.Module:
    return mixtral(output_router_logits=False)


def mixtral_loop() -> nn.Module:
    """A loop over the experts that got tokens: which and how many experts differs between ranks."""
    return mixtral("eager", count=24)


def qwen3_moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **_DECODER, **_EXPERTS, head_dim=10, num_experts=6, moe_intermediate_size=28
    )
    config._experts_implementation = "batched_mm"
    return transformers.Qwen3MoeForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=40,
        d_kv=10,
        d_ff=76,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=76,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=40,
        intermediate_size=76,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=_MELS,
        d_model=40,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=76,
        decoder_ffn_dim=76,
        max_source_positions=_FRAMES // 2,
        max_target_positions=64,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config)


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        title="Llama", model=llama, loss=language_loss, targets=(*_ATTENTION, "down_proj")
    ),
    "mistral": Architecture(title="Mistral", model=mistral, loss=padded_loss, targets=_ATTENTION),
    "qwen2": Architecture(title="Qwen2, tied", model=qwen2, loss=padded_loss, targets=_ATTENTION),
    "qwen3": Architecture(title="Qwen3", model=qwen3, loss=language_loss, targets=_ATTENTION),
    "gemma2": Architecture(title="Gemma 2", model=gemma2, loss=language_loss, targets=_ATTENTION),
    "gemma3": Architecture(title="Gemma 3", model=gemma3, loss=padded_loss, targets=_ATTENTION),
    "phi3": Architecture(
        title="Phi-3", model=phi3, loss=language_loss, targets=("qkv_proj", "o_proj")
    ),
    "gpt2": Architecture(
        title="GPT-2", model=gpt2, loss=language_loss, targets=("c_attn", "c_proj")
    ),
    "opt": Architecture(
        title="OPT", model=opt, loss=padded_loss, targets=("q_proj", "v_proj", "out_proj")
    ),
    "mixtral": Architecture(
        title="Mixtral",
        model=mixtral_without_router_loss,
        loss=language_loss,
        targets=_ATTENTION,
    ),
    "mixtral-router": Architecture(
        title="Mixtral, router loss", model=mixtral, loss=language_loss, targets=_ATTENTION
    ),
    "mixtral-loop": Architecture(
        title="Mixtral, experts in a loop",
        model=mixtral_loop,
        loss=language_loss,
        targets=_ATTENTION,
    ),
    "qwen3-moe": Architecture(
        title="Qwen3-MoE", model=qwen3_moe, loss=language_loss, targets=_ATTENTION
    ),
    "t5": Architecture(title="T5", model=t5, loss=translation_loss, targets=("q", "v", "wo")),
    "bert": Architecture(title="BERT", model=bert, loss=masked_loss, targets=("query", "value")),
    "vit": Architecture(title="ViT", model=vit, loss=image_loss, targets=("q_proj", "v_proj")),
    "whisper": Architecture(
        title="Whisper", model=whisper, loss=speech_loss, targets=("q_proj", "v_proj", "fc1")
    ),
}
