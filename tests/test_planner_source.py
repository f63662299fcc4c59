"""Models that configurations describe: dtypes of their parameters, adapters, ties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fcdp_compile.planner.source import ModelOptions, find_source
from fcdp_compile.torch_compat import tracing_mode

pytest.importorskip("transformers", reason="configurations need transformers")

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}


def _model(folder: Path, lora: int | None, **more: object) -> torch.nn.Module:
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIG | more))
    with tracing_mode():
        model, _ = find_source(str(file), ModelOptions(seq=8, lora=lora)).build(2, 8)
    return model


@pytest.mark.parametrize("dtype", [{}, {"torch_dtype": "bfloat16"}, {"dtype": "float16"}])
def test_trained_weights_are_fp32_whatever_they_are_on_disk(
    tmp_path: Path, dtype: dict[str, str]
) -> None:
    assert {p.dtype for p in _model(tmp_path, None, **dtype).parameters()} == {torch.float32}


def test_adapters_are_trained_on_a_frozen_model(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="adapters need peft")

    found = {(p.requires_grad, p.dtype) for p in _model(tmp_path, 4).parameters()}

    assert found == {(True, torch.float32), (False, torch.bfloat16)}


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    names = [n for n, _ in _model(tmp_path, None).named_parameters()]

    assert not [n for n in names if "lm_head" in n]
