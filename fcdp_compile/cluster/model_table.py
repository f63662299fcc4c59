"""Shapes of well-known models, as Hugging Face configurations by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def _gpt(layers: int, hidden: int, heads: int) -> Config:
    """GPT-2-XL with more and wider layers: the models of FCDP (Park et al.), section VI."""
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "vocab_size": 50257,
    }


def _llama_like(
    model_type: str,
    *,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    **more: Any,
) -> Config:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **more,
    }


# All models but gpt-* have the configurations that their makers published.
MODELS: dict[str, Config] = {
    "gpt-10b": _gpt(40, 4800, 40),
    "gpt-15b": _gpt(40, 5760, 45),
    "gpt-20b": _gpt(40, 6656, 52),
    "gpt-25b": _gpt(39, 7168, 56),
    "gpt-30b": _gpt(40, 7936, 62),
    "llama-2-7b": _llama_like(
        "llama", hidden=4096, inner=11008, layers=32, heads=32, kv_heads=32, vocabulary=32000
    ),
    "llama-3-8b": _llama_like(
        "llama", hidden=4096, inner=14336, layers=32, heads=32, kv_heads=8, vocabulary=128256
    ),
    "llama-3-70b": _llama_like(
        "llama", hidden=8192, inner=28672, layers=80, heads=64, kv_heads=8, vocabulary=128256
    ),
    "mistral-7b": _llama_like(
        "mistral",
        hidden=4096,
        inner=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        vocabulary=32000,
        sliding_window=None,
    ),
    "qwen2.5-7b": _llama_like(
        "qwen2", hidden=3584, inner=18944, layers=28, heads=28, kv_heads=4, vocabulary=152064
    ),
    "qwen2.5-14b": _llama_like(
        "qwen2", hidden=5120, inner=13824, layers=48, heads=40, kv_heads=8, vocabulary=152064
    ),
    "qwen2.5-32b": _llama_like(
        "qwen2", hidden=5120, inner=27648, layers=64, heads=40, kv_heads=8, vocabulary=152064
    ),
    "phi-3-mini": _llama_like(
        "phi3", hidden=3072, inner=8192, layers=32, heads=32, kv_heads=32, vocabulary=32064
    ),
    "gemma-2-9b": _llama_like(
        "gemma2",
        hidden=3584,
        inner=14336,
        layers=42,
        heads=16,
        kv_heads=8,
        vocabulary=256000,
        head_dim=256,
    ),
}
"""Configurations by name."""
