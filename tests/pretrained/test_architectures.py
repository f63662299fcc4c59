"""Checkpoints whose names and tensors Transformers changes on loading, each in its own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    CLIPVisionConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import CheckpointError

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BERT = BertConfig(**SIZES)


def _t5() -> PreTrainedModel:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    )


def _deepseek() -> PreTrainedModel:
    """Experts in some layers, a projection in two parts."""
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            **SIZES,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
            first_k_dense_replace=1,
        )
    )


def _llava() -> PreTrainedModel:
    """Models within a model; checkpoints have other prefixes for them."""
    vision = CLIPVisionConfig(**{**SIZES, "vocab_size": None}, image_size=16, patch_size=8)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=LlamaConfig(**SIZES, num_key_value_heads=1))
    )


def _wav2vec2() -> PreTrainedModel:
    """A parametrised weight."""
    return Wav2Vec2ForCTC(
        Wav2Vec2Config(
            **{**SIZES, "vocab_size": 16},
            conv_dim=(8, 8),
            conv_stride=(2, 2),
            conv_kernel=(3, 3),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
        )
    )


@pytest.mark.parametrize("make", [_t5, _deepseek, _llava, _wav2vec2])
def test_as_from_pretrained(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    made = make()
    for values in made.state_dict().values():
        if not values.any():  # memory that nobody has filled may be zeros, too
            values.fill_(0.5)
    made.save_pretrained(tmp_path)
    expected = type(made).from_pretrained(tmp_path).state_dict()
    with torch.device("meta"):
        model = type(made)(made.config)
    fcdp_compile.shard(model)
    fcdp_compile.load_pretrained(model, tmp_path)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert set(state_of(model).unset.names()).isdisjoint(expected)


def test_another_head(tmp_path: Path) -> None:
    pretrained = BertForPreTraining(BERT)
    pretrained.save_pretrained(tmp_path)
    model = BertForSequenceClassification(BERT)
    before = model.classifier.weight.detach().clone()
    fcdp_compile.shard(model)
    with pytest.raises(CheckpointError, match=r"missing tensors 'classifier.*head=False"):
        fcdp_compile.load_pretrained(model, tmp_path)
    fcdp_compile.load_pretrained(model, tmp_path, head=False)
    assert torch.equal(model.classifier.weight, before)
    pooler = pretrained.bert.pooler.dense.weight
    assert torch.equal(model.bert.pooler.dense.weight, pooler)


def test_trained_copies_that_keep_their_values_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pretrained = BertForSequenceClassification(BERT)
    pretrained.save_pretrained(tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    model = peft.get_peft_model(BertForSequenceClassification(BERT), config)
    fcdp_compile.shard(model)
    fcdp_compile.load_pretrained(model, tmp_path)
    (warning,) = (r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert "classifier.modules_to_save.default.weight keeps its values: PEFT trains" in warning
    assert "(2 tensors in all)" in warning
