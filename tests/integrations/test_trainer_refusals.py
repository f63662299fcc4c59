"""The refusals of the Trainer on fcdp: one sentence, before anything is sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)

from fcdp_compile.integrations.accelerate import Accelerator
from fcdp_compile.integrations.trainer_checkpoints import last_whole_checkpoint
from fcdp_compile.integrations.transformers import FcdpOptions, Seq2SeqTrainer, Trainer


def _trainer(folder: Path, *, trainer: dict[str, Any] | None = None, **arguments: Any) -> Trainer:
    args = TrainingArguments(str(folder), use_cpu=True, report_to=[], **arguments)
    return Trainer(model=nn.Linear(2, 2), args=args, **(trainer or {}))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"torch_compile": True}, "torch_compile with backend 'inductor' is given"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size would start again"),
        ({"bf16_full_eval": True}, r"use FcdpOptions\(param_dtype=…\) or bf16=True"),
        ({"optim": "lomo"}, "'lomo' steps inside of the backward"),
        ({"optim": "galore_adamw_layerwise"}, "use adamw_torch"),
        ({"save_on_each_node": True}, "an output_dir that all nodes share"),
        ({"fsdp": True}, "fsdp is given, and one model cannot be sharded by two systems"),
    ],
)
def test_training_arguments(tmp_path: Path, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        _trainer(tmp_path, **arguments)


@pytest.mark.parametrize("name", ["use_vllm", "use_transformers_continuous_batching"])
def test_ways_to_generate_of_trl(tmp_path: Path, name: str) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    from fcdp_compile.integrations.trl import GRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0})), pad_token="<pad>", eos_token="<pad>"
    )
    with pytest.raises(ValueError, match=f"{name} is given, with which TRL reads.*stream_state"):
        GRPOTrainer(
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                    num_attention_heads=1,
                )
            ),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(
                str(tmp_path), use_cpu=True, report_to=[], bf16=False, beta=0.0, **{name: True}
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["a"]}),
            processing_class=tokenizer,
        )  # fmt: skip


def test_what_accelerate_was_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(ValueError, match="unset ACCELERATE_DYNAMO_BACKEND"):
        _trainer(tmp_path)


def test_a_model_that_is_compiled_already(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r"wrapped by torch\.compile, which hides its arguments"):
        Trainer(model=torch.compile(nn.Linear(2, 2)), args=args)


def test_an_optimizer_that_is_there_already(tmp_path: Path) -> None:
    """It trains the sharded parameters; one that has taken steps would lose its states."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match="SGD has a state of parameter 'weight'"):
        Trainer(model=model, args=args, optimizers=(optimizer, None)).sharded_model()
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model=model, args=args, optimizers=(fresh, None))
    assert fresh.param_groups[0]["params"] == list(trainer.sharded_model().parameters())


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (
            {"dp_replicate_size": 2},
            r"dp_replicate_size=2, but FcdpOptions\(strategy=…\) says how far",
        ),
        ({"dp_shard_size": 4}, r"dp_shard_size=4, but ranks / \(cp \* tp\) is 1; set it to 1"),
        ({"sp_size": 4}, "sp_size=4, but FcdpOptions has cp=2; give one of them"),
        ({"tp_size": 4}, "tp_size=4, but FcdpOptions has tp=2; give one of them"),
    ],
)
def test_sizes_of_accelerate(tmp_path: Path, sizes: dict[str, int], told: str) -> None:
    options = {"fcdp": FcdpOptions(cp=2, tp=2)} if sizes.keys() & {"sp_size", "tp_size"} else {}
    with pytest.raises(ValueError, match=told):
        _trainer(tmp_path, parallelism_config=ParallelismConfig(**sizes), trainer=options)
    with pytest.raises(ValueError, match=told):
        Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes), **options)


def test_sequence_parallelism_of_accelerate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ParallelismConfig(sp_size=2)
    trainer = _trainer(tmp_path, parallelism_config=sizes)
    assert trainer.fcdp.cp == 2
    assert trainer.args.parallelism_config is sizes
    args = Seq2SeqTrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], parallelism_config=sizes
    )
    with pytest.raises(ValueError, match=r"Seq2SeqTrainer cannot train on parts.*\(cp=2\)"):
        Seq2SeqTrainer(model=nn.Linear(2, 2), args=args)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    AcceleratorState._reset_state()
    with pytest.raises(ValueError, match="give it to TrainingArguments"):
        _trainer(tmp_path)
    AcceleratorState._reset_state()


def test_the_backend_may_be_named(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, torch_compile=True, torch_compile_backend="fcdp")
    assert trainer.args.torch_compile_backend == "fcdp"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"strategy": "fcpd"}, "fcpd"),
        ({"options": {"bucket": 1}}, "did you mean 'bucket_mb'"),
    ],
)
def test_options(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FcdpOptions(**options)


def test_the_last_checkpoint_that_is_whole(tmp_path: Path) -> None:
    assert last_whole_checkpoint(tmp_path / "none") is None
    for step, text in ((5, "{}"), (40, "{}"), (100, '{"global'), (200, None)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        if text is not None:
            (folder / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-300-old").mkdir()
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-40")
