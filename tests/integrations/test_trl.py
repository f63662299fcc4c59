"""TRL's Trainers on fcdp train as they do on DDP; a second model crosses between nodes once."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
import peft
import pytest
import tokenizers
import torch
import torch.distributed as dist
import trl
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl.experimental import gkd

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.integrations import trl as ours
from fcdp_compile.integrations import trl_experimental
from fcdp_compile.integrations.transformers import SENT
from tests.distributed.jobs import message_of
from tests.distributed.ranks import run
from tests.integrations.test_trainer import TOLERANCE, whole
from tests.integrations.vllm_server import Server, serve

pytestmark = pytest.mark.distributed

WORDS = ["sun", "moon", "star", "tree", "bird", "fish", "wind", "rain"]
ROWS = 16

ARGUMENTS: dict[str, Any] = {
    "use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 3, "logging_steps": 1,
    "bf16": False, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "adam_epsilon": 1e-5,
    "save_strategy": "no", "seed": 3,
}  # fmt: skip

_TIMES = ("runtime", "per_second", "_time", "flos", "inter_node")
"""Parts of the names of log entries that are times, and of those that only fcdp writes."""


def _text(i: int) -> str:
    return " ".join(WORDS[(i * j + i) % 8] for j in range(1, 4 + i % 3))


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    found = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    found.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    return found


def _model(seed: int, *, scores: bool = False) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=3 + len(WORDS), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, num_labels=1,
    )  # fmt: skip
    return LlamaForSequenceClassification(config) if scores else LlamaForCausalLM(config)


def _lora() -> peft.LoraConfig:
    torch.manual_seed(5)  # the adapters' initialisation
    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )


def _preferences(folder: Path) -> Any:
    """On a disk that ranks share, as TRL keeps there what it computes ahead."""
    if dist.get_rank() == 0 and not folder.exists():
        columns = {"prompt": 0, "chosen": 1, "rejected": 5}
        rows = {name: [" " + _text(i + by) for i in range(ROWS)] for name, by in columns.items()}
        datasets.Dataset.from_dict(rows).save_to_disk(folder)
    dist.barrier()
    return datasets.load_from_disk(folder)


def _sft(classes: Any, folder: Path, *, completions: bool = False, **kwargs: Any) -> Any:
    own = {name: kwargs.pop(name) for name in list(kwargs) if name != "fcdp"}
    lora = own.pop("lora", False)
    args = {
        **ARGUMENTS,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        **own,
    }
    rows: dict[str, list[str]] = {"text": [_text(i) for i in range(ROWS)]}
    if completions:
        rows = {"prompt": rows["text"], "completion": [" " + _text(i + 2) for i in range(ROWS)]}
    return classes.SFTTrainer(
        model=_model(0), args=trl.SFTConfig(str(folder), **args),
        train_dataset=datasets.Dataset.from_dict(rows), peft_config=_lora() if lora else None,
        eval_dataset=datasets.Dataset.from_dict({"text": [WORDS[i] + " sun" for i in range(8)]}),
        processing_class=_tokenizer(), **kwargs,
    )  # fmt: skip


def _dpo(
    classes: Any, folder: Path, *, reference: bool = True, lora: bool = False, **kwargs: Any
) -> Any:
    own = {name: kwargs.pop(name) for name in list(kwargs) if name != "fcdp"}
    rows = _preferences(folder.parent / "rows")
    return classes.DPOTrainer(
        model=_model(0), ref_model=_model(1) if reference else None,
        args=trl.DPOConfig(str(folder), **{**ARGUMENTS, **own}), train_dataset=rows,
        eval_dataset=rows.select(range(4)), peft_config=_lora() if lora else None,
        processing_class=_tokenizer(), **kwargs,
    )  # fmt: skip


def _kto(classes: Any, folder: Path, **kwargs: Any) -> Any:
    rows = {
        "prompt": [_text(i) for i in range(ROWS)],
        "completion": [" " + _text(i + 1) for i in range(ROWS)],
        "label": [i % 2 == 0 for i in range(ROWS)],
    }
    return classes.KTOTrainer(
        model=_model(0), ref_model=_model(1), args=trl.KTOConfig(str(folder), **ARGUMENTS),
        train_dataset=datasets.Dataset.from_dict(rows), processing_class=_tokenizer(), **kwargs,
    )  # fmt: skip


def _reward(classes: Any, folder: Path, **kwargs: Any) -> Any:
    return classes.RewardTrainer(
        model=_model(0, scores=True), args=trl.RewardConfig(str(folder), **ARGUMENTS),
        train_dataset=_preferences(folder.parent / "rows"), processing_class=_tokenizer(), **kwargs,
    )  # fmt: skip


def _grpo(classes: Any, folder: Path, **kwargs: Any) -> Any:
    """A policy, a reference that TRL loads from the policy's folder, and a reward model."""
    start = folder.parent / "start"
    if dist.get_rank() == 0 and not start.exists():
        _model(0).save_pretrained(start)
        _tokenizer().save_pretrained(start)
    dist.barrier()
    args = trl.GRPOConfig(
        str(folder), num_generations=2, max_completion_length=6, beta=0.1, **ARGUMENTS
    )
    return classes.GRPOTrainer(
        model=LlamaForCausalLM.from_pretrained(start), reward_funcs=[_model(3, scores=True)], args=args,
        train_dataset=datasets.Dataset.from_dict({"prompt": [_text(i) for i in range(ROWS)]}),
        processing_class=_tokenizer(), reward_processing_classes=_tokenizer(), **kwargs,
    )  # fmt: skip


def _gkd(classes: Any, folder: Path, **kwargs: Any) -> Any:
    """Half of the batches are generated by the student, the other half by the teacher."""
    messages = [
        [{"role": "user", "content": _text(i)}, {"role": "assistant", "content": _text(i + 1)}]
        for i in range(ROWS)
    ]
    args = gkd.GKDConfig(
        str(folder), max_length=32, max_new_tokens=4, lmbda=0.5, seq_kd=True, **ARGUMENTS
    )
    return classes.GKDTrainer(
        model=_model(0), teacher_model=_model(1), args=args, processing_class=_tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"messages": messages}), **kwargs,
    )  # fmt: skip


def _companions(trainer: Any) -> list[nn.Module]:
    named = [getattr(trainer, name, None) for name in ("ref_model", "teacher_model")]
    rewards = list(getattr(trainer, "reward_funcs", ()))
    return [m for m in (*named, *rewards) if isinstance(m, nn.Module)]


class _Sent(TrainerCallback):
    """Notes the bytes of weights that each second model has sent between nodes, after each step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.bytes: list[list[int]] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        totals = [fcdp_compile.traffic(m).total for m in _companions(self.trainer)]
        self.bytes.append([t.bytes("inter") - t.bytes("inter", "agree") for t in totals])


def _both(
    make: Any,
    folder: Path,
    *,
    classes: tuple[Any, Any] = (trl, ours),
    sizes: Mapping[str, int] = MappingProxyType({}),
    **kwargs: Any,
) -> Any:
    """Train on DDP and on fcdp and compare; returns fcdp's Trainer.

    sizes: of groups of two ranks that share work.
    """
    trainers: list[Any] = []
    sent = _Sent()
    for side, own in enumerate(classes):
        torch._dynamo.reset()
        random.seed(11 + dist.get_rank())
        own_options = ours.FcdpOptions(nodes=2, **sizes, options={"compute": "eager"})  # type: ignore[arg-type]
        options = {"fcdp": own_options} if side else {}
        if sizes:
            options["per_device_train_batch_size"] = 1 + side  # of a group
        trainers.append(make(own, folder / f"side-{side}", **kwargs, **options))
        if side:
            sent.trainer = trainers[1]
            trainers[1].add_callback(sent)
        trainers[-1].train()
        if kwargs.get("eval_strategy"):
            trainers[-1].evaluate()
    plain, mine = trainers
    for row, other in zip(mine.state.log_history, plain.state.log_history, strict=True):
        for name, value in other.items():
            if isinstance(value, float) and not any(part in name for part in _TIMES):
                assert row[name] == pytest.approx(value, rel=TOLERANCE, abs=1e-6, nan_ok=True), name
    values = dict(plain.model.named_parameters())
    for name, parameter in mine.model.named_parameters():
        error = (whole(parameter) - values[name].detach()).abs().max()
        assert error <= TOLERANCE * values[name].abs().max().clamp_min(1e-2), name
    assert all(row[SENT] > 0 for row in mine.state.log_history if "loss" in row)
    _check_companions(mine, sent.bytes)
    return mine


def _check_companions(trainer: Any, sent: list[list[int]]) -> None:
    for i, model in enumerate(_companions(trainer)):
        state = state_of(model)
        assert state.lanes is state_of(trainer.model).lanes
        assert not any(p.requires_grad for p in model.parameters())
        # W (N - 1) / N of a rank alone on its node, gathered once.
        size = sum(p.numel() * 4 for p in model.parameters()) / trainer.accelerator.tp
        assert [step[i] for step in sent] == [sent[0][i]] * len(sent)
        assert size / 2 <= sent[0][i] <= 1.2 * size / 2 + 256


def _referred(mesh: DeviceMesh, folder: Path) -> None:
    datasets.disable_progress_bars()
    _both(_dpo, folder)


@pytest.mark.slow
def test_dpo_with_a_reference(tmp_path: Path) -> None:
    run(_referred, tmp_path / "dpo", nodes=2, ranks_per_node=1)


def _others(mesh: DeviceMesh, folder: Path) -> None:
    datasets.disable_progress_bars()
    adapted = _both(_dpo, folder / "adapters", reference=False, lora=True)
    assert adapted.ref_model is None
    # Without adapters the policy is the reference, in the same compiled model.
    assert fcdp_compile.explain(adapted.model).uncovered == ()
    _both(_dpo, folder / "ahead", precompute_ref_log_probs=True)
    _both(
        _dpo, folder / "own", reference=False, precompute_ref_log_probs=True, eval_strategy="steps",
        eval_steps=2, gradient_checkpointing=True,
    )  # fmt: skip
    _both(_kto, folder / "kto")
    _both(_reward, folder / "reward")


@pytest.mark.rare
def test_other_preferences(tmp_path: Path) -> None:
    run(_others, tmp_path, nodes=2, ranks_per_node=1)


PARTS: list[dict[str, Any]] = [
    {"completions": True, "padding_free": True, "max_length": None},
    {"packing": True, "max_length": 12, "eval_packing": False, "dataloader_drop_last": True},
    {"loss_type": "dft"},
]


def _parts(mesh: DeviceMesh, folder: Path) -> None:
    datasets.disable_progress_bars()
    eval_args = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 2}
    for i, variation in enumerate(PARTS):
        mine = _both(_sft, folder / str(i), sizes={"cp": 2}, lora=True, **eval_args, **variation)
        assert mine.accelerator.cp == 2
        logged = {name for row in mine.state.log_history for name in row}
        assert logged >= {"mean_token_accuracy", "num_tokens", "eval_entropy", "eval_loss"}


def _parameters(mesh: DeviceMesh, folder: Path) -> None:
    datasets.disable_progress_bars()
    tp = {"tp": 2}
    for i, variation in enumerate(PARTS[:2]):
        _both(_sft, folder / str(i), sizes=tp, lora=True, **variation)
    _both(_dpo, folder / "dpo", sizes=tp)
    with pytest.raises(ArgumentError, match=r"GRPOTrainer samples its batches.*\(tp=2\)"):
        _grpo(ours, folder / "grpo", fcdp=ours.FcdpOptions(nodes=2, tp=2))


@pytest.mark.rare
def test_ranks_that_share_parameters(tmp_path: Path) -> None:
    run(_parameters, tmp_path, nodes=2, ranks_per_node=2)


@pytest.mark.rare
def test_sft_on_parts_of_sequences(tmp_path: Path) -> None:
    run(_parts, tmp_path, nodes=2, ranks_per_node=2)


def _generating(mesh: DeviceMesh, folder: Path) -> None:
    datasets.disable_progress_bars()
    trained = _both(_sft, folder / "sft")
    saved = Path(trained.args.output_dir, "checkpoint-3")
    assert (saved / "tokenizer.json").is_file()
    LlamaForCausalLM.from_pretrained(saved)
    _both(_grpo, folder / "grpo")
    _both(_gkd, folder / "gkd", classes=(gkd, trl_experimental))


@pytest.mark.rare
def test_sft_grpo_and_gkd(tmp_path: Path) -> None:
    run(_generating, tmp_path, nodes=2, ranks_per_node=1)


def _served(mesh: DeviceMesh, folder: Path) -> None:
    """At each step the server has the policy's weights: it computes the log probabilities of the policy."""
    datasets.disable_progress_bars()
    server = Server(_model(7))
    with serve(server) as address:
        args = trl.GRPOConfig(
            str(folder), num_generations=2, max_completion_length=6, beta=0.0, use_vllm=True,
            vllm_mode="server", vllm_server_base_url=address, **ARGUMENTS,
        )  # fmt: skip
        trainer: Any = ours.GRPOTrainer(
            model=_model(0), args=args,
            reward_funcs=lambda completions, **_: [float(i) for i in range(len(completions))],
            processing_class=_tokenizer(), fcdp=ours.FcdpOptions(nodes=2),
            train_dataset=datasets.Dataset.from_dict({"prompt": [_text(i) for i in range(ROWS)]}),
        )  # fmt: skip
        with torch.compiler.set_stance("force_eager"):  # TRL's loss takes long to compile
            trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        assert len(rows) == 3
        assert all(row["sampling/sampling_logp_difference/max"] < 1e-5 for row in rows)
        before = {name: tensor.clone() for name, tensor in server.tensors.items()}
        trainer.vllm_generation.sync_weights()
        values = {name: whole(p).detach() for name, p in trainer.model.named_parameters()}
        server.fails = True
        error = message_of(Exception, trainer.vllm_generation.sync_weights)
    if dist.get_rank() == 0:
        assert [len(calls) for calls in server.loads] == [1, 1, 1, 1, 0]
        assert server.tensors.keys() == values.keys()
        assert all(torch.equal(server.tensors[n], values[n]) for n in values)
        assert not any(torch.equal(before[n], values[n]) for n in values)
        assert "Request failed: 400" in error, error
    else:
        assert not server.loads
        assert "rank 0: left the loop" in error, error


@pytest.mark.slow
def test_grpo_with_a_server_of_vllm(tmp_path: Path) -> None:
    pytest.importorskip("requests", reason="TRL's client of the server needs requests")
    run(_served, tmp_path, nodes=2, ranks_per_node=1)
