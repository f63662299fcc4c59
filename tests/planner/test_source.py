"""Models from configurations: dtypes of their parameters, adapters, ties."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fcdp_compile.errors import FcdpError
from fcdp_compile.models.quantised.weight import QuantisedWeight
from fcdp_compile.tools.planner.source import ModelOptions, find_source
from fcdp_compile.tools.planner.traced import trace
from fcdp_compile.torch_compat.graphs import tracing_mode

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


def _model(folder: Path, lora: int | None, *, quantise: str | None = None, **more: object) -> Any:
    file = folder / "config.json"
    file.write_text(json.dumps(CONFIG | more))
    options = ModelOptions(seq=8, lora=lora, quantise=quantise)
    with tracing_mode():
        model, _ = find_source(str(file), options).build(2, 8)
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


@pytest.mark.parametrize(
    ("quantise", "in_bytes"), [("nf4", 9 / 16), ("fp4", 9 / 16), ("int8", 9 / 8)]
)
def test_quantised_base_weights_are_packed(tmp_path: Path, quantise: str, in_bytes: float) -> None:
    """All linear layers but the last one, at 32 inputs each or more; adapters and norms are as before."""
    pytest.importorskip("peft", reason="adapters need peft")

    model = _model(tmp_path, 4, quantise=quantise, tie_word_embeddings=False)

    values = 4 * 32 * 32 + 3 * 32 * 64
    weights = [m for m in model.modules() if isinstance(m, QuantisedWeight)]
    packed = sum(p.nbytes for m in weights for p in m.parameters())
    assert len(weights) == 7
    assert values * in_bytes * (15 / 16) < packed <= values * in_bytes
    assert model.get_output_embeddings().weight.dtype is torch.bfloat16
    found = {(p.requires_grad, p.dtype) for p in model.parameters()}
    assert found == {
        *((True, torch.float32), (False, torch.bfloat16)),
        *((False, torch.uint8), (False, torch.float32)),
    }


def test_quantised_weights_need_adapters() -> None:
    with pytest.raises(FcdpError, match="give the rank of adapters with --lora"):
        ModelOptions(seq=8, quantise="nf4")


def test_tied_weights_are_one_parameter(tmp_path: Path) -> None:
    names = [n for n, _ in _model(tmp_path, None).named_parameters()]

    assert not [n for n in names if "lm_head" in n]


# What a configuration is trained for.

BERT = {**CONFIG, "model_type": "bert", "max_position_embeddings": 8}


def _made(folder: Path, config: dict[str, object]) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    with tracing_mode():
        return type(find_source(str(file), ModelOptions(seq=8)).build(2, 8)[0]).__name__


@pytest.mark.parametrize(
    ("config", "made"),
    [
        (BERT | {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        (BERT | {"architectures": ["BertLMHeadModel"], "is_decoder": True}, "BertLMHeadModel"),
        (BERT | {"is_decoder": True}, "BertLMHeadModel"),
        (CONFIG | {"architectures": ["LLaMAForCausalLM"]}, "LlamaForCausalLM"),
        (CONFIG | {"architectures": None}, "LlamaForCausalLM"),
        (
            {"model_type": "distilbert", "n_layers": 1, "dim": 32, "n_heads": 2},
            "DistilBertForMaskedLM",
        ),
    ],
)
def test_architectures_decide_what_is_trained(
    tmp_path: Path, config: dict[str, object], made: str
) -> None:
    assert _made(tmp_path, config) == made


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BERT, r"several ways.*BertLMHeadModel.* or .*BertForMaskedLM.*your_module:build_fn"),
        (
            BERT | {"architectures": ["BertModel"]},
            r"does not know the inputs of BertModel \(from architectures\).*BertForM",
        ),
        (
            CONFIG | {"architectures": ["LlamaForSequenceClassification"]},
            r'inputs of LlamaForSequenceClassification .*set "architectures": \["LlamaForCausalLM"\]',
        ),
        ({"model_type": "bart"}, r"several ways"),
        ({"model_type": "t5"}, r"no causal or masked language model of type 't5'; give a function"),
        ({"model_type": "vit"}, r"no causal or masked language model of type 'vit'"),
    ],
)
def test_what_else_would_be_guessed_is_refused(
    tmp_path: Path, config: dict[str, object], expected: str
) -> None:
    with pytest.raises(FcdpError, match=expected):
        _made(tmp_path, config)


def test_an_encoder_is_traced_as_it_is_trained(tmp_path: Path) -> None:
    """The trace fits any batch and has every parameter."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BERT | {"architectures": ["BertForMaskedLM"]}))
    source = find_source(str(file), ModelOptions(seq=8, dtype=torch.float32))
    found = trace(source.build, seq=8, param_dtype=torch.float32)
    assert found.has_any_batch
    assert found.unread == ()
