"""`generate` while a Trainer evaluates, and the Trainer's message about a model that is not compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    TrainingArguments,
)

from fcdp_compile.integrations import transformers as integration
from tests.distributed.models import Broken
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

ARGUMENTS: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "max_steps": 1,
    "dataloader_pin_memory": False, "per_device_train_batch_size": 2, "logging_steps": 1,
}  # fmt: skip


class _Generates(TrainerCallback):
    """Like a user's callback: generates with the model, a different length on each rank."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        wanted = 2 + dist.get_rank()
        ids = torch.full((1, 3), 5)
        found = kwargs["model"].generate(ids, max_new_tokens=wanted, min_new_tokens=wanted)
        self.lengths.append(found.shape[1])


def _seq2seq(trainer_class: type[transformers.Seq2SeqTrainer], folder: Path) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=61, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    rows = [
        {n: torch.randint(2, 61, (6,), generator=generator) for n in ("input_ids", "labels")}
        for _ in range(11)
    ]
    callback = _Generates()
    trainer = trainer_class(
        model=T5ForConditionalGeneration(config),
        args=Seq2SeqTrainingArguments(
            str(folder), predict_with_generate=True, generation_max_length=9, eval_strategy="steps",
            eval_steps=1, **ARGUMENTS,
        ),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    assert callback.lengths == [1 + 2 + dist.get_rank()]
    return trainer.predict(rows)


def _predicts(mesh: DeviceMesh, folder: Path) -> None:
    expected = _seq2seq(transformers.Seq2SeqTrainer, folder / "plain")
    found = _seq2seq(integration.Seq2SeqTrainer, folder / "fcdp")
    assert np.array_equal(found.predictions, expected.predictions)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Broken()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        logits = self.inner(ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())}


def _told(mesh: DeviceMesh, folder: Path) -> list[str]:
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(integration.log, "warning", lambda text, *args: told.append(text % args))
        for has_breaks in (True, False):
            torch._dynamo.reset()
            model = _WithLoss()
            if not has_breaks:
                patch.setattr(model.inner, "block", lambda hidden: hidden)
            integration.Trainer(
                model=model,
                args=TrainingArguments(str(folder), **ARGUMENTS),
                train_dataset=[{"ids": torch.arange(5)} for _ in range(9)],
            ).train()
    return told


def _both(mesh: DeviceMesh, folder: Path) -> list[str]:
    _predicts(mesh, folder / "generate")
    return _told(mesh, folder / "told")


@pytest.mark.rare
def test_generating_and_what_is_said_of_graph_breaks(tmp_path: Path) -> None:
    first, second = run(_both, tmp_path, nodes=2, ranks_per_node=1)
    assert second == [], "rank 0 tells it"
    assert "graph breaks, after which compute waits for the first gathers: " in first[0]
    assert "TORCH_LOGS=graph_breaks" in first[0]
    assert len(first) == 2  # the second has unused parameters and no graph break
    assert "graph breaks" not in first[1]
    assert "parameters in no compiled graph" in first[1]
    assert "inner.first.weight" in first[1]
