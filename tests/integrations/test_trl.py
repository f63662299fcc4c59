"""TRL's SFTTrainer on fcdp by the mixin, compared with SFTTrainer on DDP; skipped without trl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fcdp_compile.integrations.transformers import SENT, FcdpMixin
from tests.distributed.ranks import run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")


class _SFTTrainer(FcdpMixin, trl.SFTTrainer):  # type: ignore[misc]
    """The recipe."""


WORDS = ["sun", "moon", "star", "tree", "bird", "fish", "wind", "rain"]


def _train(trainer_class: Any, folder: Path) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    texts = [" ".join(WORDS[(i * j) % 8] for j in range(3, 6 + i % 5)) for i in range(24)]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    trainer = trainer_class(
        model=model,
        args=trl.SFTConfig(
            str(folder), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2, logging_steps=1,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, save_steps=2, bf16=False,
            learning_rate=1e-3, adam_epsilon=1e-5,
        ),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    return trainer


def _both(mesh: DeviceMesh, folder: Path) -> None:
    expected = _train(trl.SFTTrainer, folder / "plain").state.log_history
    found = _train(_SFTTrainer, folder / "fcdp").state.log_history
    for row, other in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens"):
            if name in other:
                assert row[name] == pytest.approx(other[name], rel=1e-4), name
    assert all(row[SENT] > 0 for row in found if "loss" in row)
    assert (folder / "fcdp" / "checkpoint-2" / "tokenizer.json").is_file()
    LlamaForCausalLM.from_pretrained(folder / "fcdp" / "checkpoint-2")


def test_sft_by_the_mixin(tmp_path: Path) -> None:
    run(_both, tmp_path, nodes=2, ranks_per_node=1)
