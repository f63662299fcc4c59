"""The models of the examples: a small Llama from scratch, or a Hugging Face checkpoint in a folder."""

from __future__ import annotations

import argparse
import contextlib
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase

from arguments import HEAD_DIM, UserError
from corpus import BYTE_VOCABULARY, Encoder

WARMUP_STEPS = 5


def small_config(args: argparse.Namespace) -> LlamaConfig:
    """Return the configuration of a Llama of the requested size, whose tokens are bytes."""
    heads = args.hidden // HEAD_DIM
    return LlamaConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=args.seq_len,
        initializer_range=0.05,  # 0.02 is for wide models; a narrow one then learns slowly
        use_cache=False,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, local_files_only=True
    )
    return tokenizer


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Return a function that turns texts into the tokenizer's ids."""

    def encode(parts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(parts, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return ids

    return encode


@contextlib.contextmanager
def checkpoint_mistakes(folder: Path) -> Iterator[None]:
    """Turn transformers' errors about a folder into one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = textwrap.shorten(str(error), 200)
        raise UserError(
            f"--model {folder} does not load as a causal language model with a tokenizer: {reason}"
        ) from error


def check_lengths(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, args: argparse.Namespace
) -> None:
    """Refuse a window length or a tokenizer that is too large for the model.

    Raises: UserError.
    """
    longest = getattr(model.config, "max_position_embeddings", args.seq_len)
    if args.seq_len > longest:
        raise UserError(f"--seq-len {args.seq_len} is more than the {longest} of {args.model}")
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer of {args.model} has {len(tokenizer)} tokens but the model embeds {rows}"
        )


def lr_factor(step: int, steps: int) -> float:
    """Warm up linearly, then fall to a tenth along a cosine."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.55 + 0.45 * math.cos(math.pi * (step - WARMUP_STEPS) / max(steps - WARMUP_STEPS, 1))
