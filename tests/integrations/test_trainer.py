"""A Trainer script with one line changed trains like the unchanged script with DDP."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    EvalPrediction,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

import fcdp_compile
from fcdp_compile.errors import ArgumentError, CheckpointError
from fcdp_compile.integrations import trainer_checkpoints
from fcdp_compile.integrations.transformers import SENT, WAITED, FcdpOptions, Trainer
from tests.distributed.ranks import run
from tests.integrations.trainer_script import run_script

pytestmark = pytest.mark.distributed

TOLERANCE = 2e-5
"""Relative; both sides add the same fp32 numbers in different orders."""
BF16_TOLERANCE = 2e-2
"""Relative; both sides round to 8 bits in different orders."""

COMPARED = (
    "loss",
    "grad_norm",
    "learning_rate",
    "eval_loss",
    "eval_accuracy",
    "train_loss",
    "epoch",
)


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    found = prediction.predictions[:, :-1].argmax(-1)
    expected = prediction.label_ids[:, 1:]
    counted = expected != -100
    return {"accuracy": float((found == expected)[counted].mean()), "rows": len(expected)}


def _both(folder: Path, tolerance: float, **variation: Any) -> Any:
    """Run the script with DDP and with fcdp, compare logs and parameters; returns fcdp's Trainer."""
    plain: Any = run_script(folder / "plain", changed=False, **variation)["trainer"]
    mine: Any = run_script(folder / "fcdp", changed=True, **variation)["trainer"]
    expected, found = plain.state.log_history, mine.state.log_history
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        for name in (n for n in other if n in COMPARED):
            assert type(row[name]) is float
            what = f"{name} of step {row['step']}"
            assert row[name] == pytest.approx(other[name], rel=tolerance, abs=1e-7), what
    values = dict(plain.model.named_parameters())
    for name, parameter in mine.model.named_parameters():
        _check_close(whole(parameter), values[name].detach(), tolerance, name)
    return mine


def whole(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _check_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-2)
    assert error <= tolerance, f"{name} is off by {error:.1e}"


def _full(mesh: DeviceMesh, folder: Path) -> None:
    mine = _both(
        folder, TOLERANCE, max_grad_norm=0.5, eval_strategy="steps", eval_steps=2,
        trainer={"compute_metrics": _accuracy},
    )  # fmt: skip
    assert all(0 < row[WAITED] < 1e6 for row in mine.state.log_history if "loss" in row)
    steps = [row for row in mine.state.log_history if "loss" in row]
    assert all(row["grad_norm"] > 0.5 for row in steps), "nothing was clipped"
    evaluated = next(row for row in mine.state.log_history if "eval_rows" in row)
    assert evaluated["eval_rows"] == 11
    state = fcdp_compile.explain(mine.model)
    assert state.uncovered == ()
    assert {p.name.split()[0] for p in state.passes} == {"forward", "backward", "evaluation"}
    # Weights are gathered and gradients reduced once: W (N - 1) / N each, plus the agreements.
    moved = 2 * sum(p.numel() * 4 for p in mine.model.parameters()) / 2
    for row in steps:
        assert moved <= row[SENT] * 2**20 <= 1.2 * moved + 2**14


def test_one_changed_line_trains_the_same(tmp_path: Path) -> None:
    run(_full, tmp_path, nodes=2, ranks_per_node=2)


def _lora_uneven(mesh: DeviceMesh, folder: Path) -> None:
    mine = _both(
        folder, TOLERANCE, lora=True, uneven=True, gradient_accumulation_steps=2, max_steps=5,
        label_smoothing_factor=0.1,
        eval_strategy="steps", eval_steps=3, trainer={"compute_metrics": _accuracy},
    )  # fmt: skip
    rows = [row for row in mine.state.log_history if "loss" in row]
    # Steps 4 and 5: all shapes are compiled and caches are warm; only the adapters' bytes cross.
    adapters = sum(p.numel() * 4 for p in mine.model.parameters() if p.requires_grad)
    assert rows[-1][SENT] * 2**20 <= 2 * adapters + 2**14


def _bf16_checkpointed(mesh: DeviceMesh, folder: Path) -> None:
    mine = _both(
        folder, BF16_TOLERANCE, uneven=True, bf16=True, gradient_checkpointing=True, max_grad_norm=0.0,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    assert {p.dtype for p in mine.model.parameters()} == {torch.float32}


def _resumed(mesh: DeviceMesh, folder: Path) -> None:
    variation: dict[str, Any] = {
        "changed": True, "model": {"dropout": 0.1}, "save_strategy": "steps", "save_steps": 2,
        "max_steps": 4, "max_grad_norm": 0.5,
    }  # fmt: skip
    once: Any = run_script(folder, **variation)["trainer"]
    saved = folder / "checkpoint-2"
    # A save that was killed midway, later than the save to resume from.
    shutil.rmtree(folder / "checkpoint-4") if dist.get_rank() == 0 else None
    killed = folder / "checkpoint-9"
    killed.mkdir(exist_ok=True)
    (killed / "trainer_state.json").write_text('{"global_st')
    dist.barrier()
    again: Any = run_script(folder, resume=True, **variation)["trainer"]
    assert fcdp_compile.traffic(again.model).steps == 2, "it was not resumed"
    assert _numbers(again.state.log_history) == _numbers(once.state.log_history)
    for (name, a), (_, b) in zip(
        once.model.named_parameters(), again.model.named_parameters(), strict=True
    ):
        assert torch.equal(whole(a), whole(b)), name
    reloaded = LlamaForCausalLM.from_pretrained(folder / "checkpoint-4")
    values = dict(reloaded.named_parameters())
    for name, parameter in again.model.named_parameters():
        assert torch.equal(whole(parameter), values[name].detach()), name
    assert (saved / "training_args.bin").is_file()
    assert not list(saved.glob("*.p*t*h*")) + list(saved.glob("optimizer*")), "pickles were written"


def _adapters_resumed(mesh: DeviceMesh, folder: Path) -> None:
    """The base is not in the checkpoint, and another base is refused."""
    variation: dict[str, Any] = {
        "changed": True, "lora": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 4,
    }  # fmt: skip
    once: Any = run_script(folder, **variation)["trainer"]
    saved = folder / "checkpoint-2"
    names = {n for file in saved.glob("fcdp/data-*/*") for n in load_file(file)}
    assert any("lora_A" in n for n in names)
    assert not any("base_layer" in n or "embed_tokens" in n for n in names)
    again: Any = run_script(folder, resume=str(saved), **variation)["trainer"]
    assert _numbers(again.state.log_history) == _numbers(once.state.log_history)
    with torch.no_grad():
        next(p for p in again.model.parameters() if not p.requires_grad).add_(1)
    with pytest.raises(
        CheckpointError, match=r"1 of the \d+ frozen parameters that were not saved"
    ):
        again.train(resume_from_checkpoint=str(saved))


class _Killed(TrainerCallback):
    """Ends a training after some steps, as if its process had died."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._steps:
            raise KeyboardInterrupt


def _survives(mesh: DeviceMesh, folder: Path, memory: Path) -> None:
    os.environ |= {"FCDP_NODE_MEMORY": str(memory), "TORCHELASTIC_RUN_ID": "job"}
    variation: dict[str, Any] = {
        "changed": True, "lora": True, "model": {"dropout": 0.1}, "max_steps": 5,
    }  # fmt: skip
    once: Any = run_script(folder, **variation)["trainer"]
    options = FcdpOptions(survive=1)
    with pytest.raises(KeyboardInterrupt):
        run_script(folder, trainer={"fcdp": options, "callbacks": [_Killed(3)]}, **variation)
    again: Any = run_script(folder, trainer={"fcdp": options}, **variation)["trainer"]
    assert fcdp_compile.traffic(again.model).steps in (2, 3), "it did not go on"
    assert _numbers(again.state.log_history) == _numbers(once.state.log_history)
    assert not any(memory.iterdir())


def test_a_killed_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    run(_survives, tmp_path, tmp_path / "memory", nodes=2, ranks_per_node=1)


def _numbers(history: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{n: row[n] for n in row if n in COMPARED} for row in history if "loss" in row]


def _best(mesh: DeviceMesh, folder: Path) -> list[dict[str, float]]:
    """The largest loss is configured to be the best, so the best evaluation is the first."""
    trainer: Any = run_script(
        folder, changed=True, save_strategy="steps", save_steps=1, eval_strategy="steps",
        eval_steps=1, load_best_model_at_end=True, save_total_limit=2, greater_is_better=True,
    )["trainer"]  # fmt: skip
    evaluated = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert evaluated[0] == max(evaluated) > evaluated[2]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint-1", "checkpoint-3"]
    assert trainer.evaluate()["eval_loss"] == evaluated[0]
    return _numbers(trainer.state.log_history)


class _Keeps(TrainerCallback):
    """Keeps the values that training begins with."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.values = {name: whole(p).clone() for name, p in kwargs["model"].named_parameters()}


def _weights_only(mesh: DeviceMesh, folder: Path, *, lora: bool) -> None:
    variation: dict[str, Any] = {
        "changed": True, "lora": lora, "save_strategy": "steps", "save_steps": 2,
        "save_only_model": True,
    }  # fmt: skip
    if not lora:  # files of another run in the folder must not be mistaken for this run's
        run_script(folder, max_steps=2, **(variation | {"save_only_model": False, "seed": 8}))
    once: Any = run_script(folder, max_steps=2, **variation)["trainer"]
    (saved,) = folder.glob("checkpoint-*")
    assert not (saved / "fcdp").exists()
    warned: list[str] = []
    keeps = _Keeps()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer_checkpoints.log, "warning", lambda text, *args: warned.append(text % args)
        )
        again: Any = run_script(
            folder, resume=str(saved), trainer={"callbacks": [keeps]}, **variation
        )["trainer"]
    assert ["start anew" in text for text in warned] == [True] * (dist.get_rank() == 0)
    assert again.state.global_step == 3
    for name, parameter in once.model.named_parameters():
        assert torch.equal(whole(parameter), keeps.values[name]), name


def _sharded_before(mesh: DeviceMesh, folder: Path) -> None:
    """A model that the user has built on meta, sharded and filled."""
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    rows = [{n: torch.arange(i, i + 5) for n in ("input_ids", "labels")} for i in range(9)]
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], save_strategy="no", max_steps=1, disable_tqdm=True
    )
    with pytest.raises(ValueError, match="on meta, which have no values to train"):
        Trainer(model=model, args=args, train_dataset=rows)
    fcdp_compile.materialize(fcdp_compile.shard(model, mesh, strategy="zero3"))
    late = Trainer(model=model, args=args, train_dataset=rows, fcdp=FcdpOptions(nodes=2))
    with pytest.raises(ValueError, match=r"FcdpOptions\(nodes=2\) comes too late"):
        late.train()
    Trainer(model=model, args=args, train_dataset=rows).train()
    assert dict(fcdp_compile.explain(model).strategies) == {"zero3": len(list(model.parameters()))}


def _several(mesh: DeviceMesh, folder: Path) -> None:
    for job in (_lora_uneven, _bf16_checkpointed, _sharded_before):
        job(mesh, folder / job.__name__)


@pytest.mark.rare
def test_variations_train_the_same(tmp_path: Path) -> None:
    run(_several, tmp_path, nodes=2, ranks_per_node=1)


def _saves(mesh: DeviceMesh, folder: Path) -> list[dict[str, float]]:
    _resumed(mesh, folder / "resumed")
    _adapters_resumed(mesh, folder / "adapters")
    for lora in (False, True):
        _weights_only(mesh, folder / f"weights-{lora}", lora=lora)
    return _best(mesh, folder / "best")


def _goes_on(mesh: DeviceMesh, folder: Path, history: list[dict[str, float]]) -> None:
    trainer: Any = run_script(
        folder / "elsewhere", changed=True, per_device_train_batch_size=4,
        resume=str(folder / "best" / "checkpoint-1"),
    )["trainer"]  # fmt: skip
    assert fcdp_compile.traffic(trainer.model).steps == 2
    for row, other in zip(_numbers(trainer.state.log_history), history, strict=True):
        assert row == pytest.approx(other, rel=TOLERANCE)


@pytest.mark.rare
def test_checkpoints(tmp_path: Path) -> None:
    """Two ranks resume bit by bit, and one rank resumes from their checkpoint."""
    history, _ = run(_saves, tmp_path, nodes=2, ranks_per_node=1)
    run(_goes_on, tmp_path, history, nodes=1, ranks_per_node=1)


def _shared(folder: Path, **sizes: int) -> tuple[Any, Any]:
    """Two groups of two ranks with batches of four are four ranks with batches of two."""
    both: dict[str, Any] = {
        "max_steps": 2, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1,
        "include_num_input_tokens_seen": "non_padding",
    }  # fmt: skip
    plain: Any = run_script(folder, changed=False, lora=True, uneven=True, **both)["trainer"]
    torch._dynamo.reset()
    mine: Any = run_script(
        folder, changed=True, lora=True, uneven=True, per_device_train_batch_size=4,
        trainer={"fcdp": FcdpOptions(nodes=2, generate="sharded")},
        parallelism_config=ParallelismConfig(**sizes, dp_shard_size=2), **both,
    )["trainer"]  # fmt: skip
    for row, other in zip(mine.state.log_history, plain.state.log_history, strict=True):
        for name in {"loss", "grad_norm", "train_loss", "num_input_tokens_seen"} & other.keys():
            assert row[name] == pytest.approx(other[name], rel=TOLERANCE), name
    # There is more padding in batches of four.
    assert 1 <= mine.state.total_flos / plain.state.total_flos < 1.3
    values = dict(plain.model.named_parameters())
    for name, parameter in mine.model.named_parameters():
        _check_close(whole(parameter), values[name].detach(), TOLERANCE, name)
    rows = _short(mine)
    assert mine.evaluate(rows)["eval_loss"] == pytest.approx(
        plain.evaluate(rows)["eval_loss"], rel=TOLERANCE
    )
    prompt = torch.arange(3, 11)[None]
    told = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(
        mine.model.generate(input_ids=prompt, **told),
        plain.model.generate(input_ids=prompt, **told),
    )
    return mine, plain


def _short(trainer: Any) -> list[dict[str, Any]]:
    return [{name: row[name][:5] for name in row} for row in trainer.eval_dataset]


def _parameters(_mesh: DeviceMesh, folder: Path) -> None:
    mine, plain = _shared(folder, tp_size=2)
    assert mine.accelerator.tp == mine.get_tp_size() == 2
    rows = _short(mine)[:-1]  # the last batch is not full
    found, expected = (t.predict(rows) for t in (mine, plain))
    assert found.predictions.shape == expected.predictions.shape
    torch.testing.assert_close(found.predictions, expected.predictions, rtol=1e-3, atol=1e-4)
    assert (found.label_ids == expected.label_ids).all()


def _sequences(_mesh: DeviceMesh, folder: Path) -> None:
    mine, _ = _shared(folder, cp_size=2)
    assert mine.accelerator.cp == mine.get_cp_size() == 2
    rows = _short(mine)
    with pytest.raises(ArgumentError, match="so only losses are evaluated"):
        mine.predict(rows)
    mine.label_smoother = object()
    with pytest.raises(
        ArgumentError, match="leave compute_loss_func and label_smoothing_factor out"
    ):
        mine.evaluate(rows)


@pytest.mark.parametrize(
    "train",
    [_parameters, _sequences],
    ids=["parameters", "sequences"],
)
@pytest.mark.rare
def test_ranks_that_share_work(train: Any, tmp_path: Path) -> None:
    run(train, tmp_path, nodes=2, ranks_per_node=2)
