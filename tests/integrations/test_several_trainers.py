"""One model in several Trainers, one after the other, and models that share parameters; a single process."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.integrations.transformers import MFU, FcdpOptions, Trainer
from tests.integrations.test_trl import ARGUMENTS, _model

_EAGER = FcdpOptions(strategy="zero3", options={"compute": "eager"})


def _trainer(folder: Path, model: Any, fcdp: FcdpOptions = _EAGER, **arguments: Any) -> Trainer:
    ids = [torch.tensor([3 + (i * j + i) % 8 for j in range(8)]) for i in range(4)]
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    args = transformers.TrainingArguments(str(folder), **{**ARGUMENTS, "max_steps": 1, **arguments})
    return Trainer(
        **({"model_init": model} if callable(model) and not hasattr(model, "forward") else {"model": model}),
        args=args, train_dataset=rows, eval_dataset=rows, fcdp=fcdp,
    )  # fmt: skip


@pytest.mark.slow
def test_a_later_trainer_has_its_own_autocast_and_way_to_generate(tmp_path: Path) -> None:
    model = _model(0)
    _trainer(tmp_path, model).train()
    seen: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda _, __, result: seen.append(result.dtype))
    for bf16 in (True, False, True):
        _trainer(tmp_path, model, bf16=bf16).evaluate()
        assert set(seen) == {torch.bfloat16 if bf16 else torch.float32}
        seen.clear()
    options = FcdpOptions(strategy="zero3", generate="sharded", options={"compute": "eager"})
    _trainer(tmp_path, model, options).sharded_model()
    assert model.generate.args[1] == "sharded"
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=2)  # no other process to wait for


@pytest.mark.slow
def test_other_options_come_too_late(tmp_path: Path) -> None:
    model = _model(0)
    _trainer(tmp_path, model).train()
    with pytest.raises(ArgumentError, match=r"zero2.*comes too late"):
        _trainer(tmp_path, model, FcdpOptions(strategy="zero2")).train()


def test_a_reference_is_trained_later(tmp_path: Path) -> None:
    reference = _model(1)
    reference.lm_head.weight.requires_grad_(False)
    first = _trainer(tmp_path, _model(0))
    first.accelerator.prepare_model(reference, evaluation_mode=True)
    assert not any(p.requires_grad for p in reference.parameters())
    _trainer(tmp_path, reference).train()
    assert [n for n, p in reference.named_parameters() if not p.requires_grad] == ["lm_head.weight"]


@pytest.mark.slow
def test_a_reference_that_shares_parameters(tmp_path: Path) -> None:
    policy, reference = _model(0), _model(1)
    shared = reference.lm_head.weight = policy.lm_head.weight
    trainer = _trainer(tmp_path, policy)
    trainer.accelerator.prepare_model(reference, evaluation_mode=True)
    assert shared.requires_grad
    with pytest.raises(ArgumentError, match=r"lm_head.weight' is trained, and is also"):
        trainer.train()
    shared.requires_grad_(False)
    trainer.train()


@pytest.mark.rare
def test_the_model_of_the_last_trial_is_gone(tmp_path: Path) -> None:
    made: list[weakref.ref[Any]] = []

    def model_init() -> Any:
        model = _model(0)
        made.append(weakref.ref(model))
        return model

    trainer = _trainer(tmp_path, model_init)
    for _ in range(3):
        trainer.train()
    gc.collect()
    assert [ref() is not None for ref in made[-3:]] == [False, False, True]
    assert len(state_of(trainer.sharded_model()).host_memory._together) == 1


@pytest.mark.slow
def test_utilisation_is_of_the_time_since_the_last_entry(tmp_path: Path) -> None:
    options = FcdpOptions(strategy="zero3", peak_tflops=1e-6, options={"compute": "eager"})
    trainer = _trainer(tmp_path, _model(0), options, max_steps=3)
    trainer.floating_point_ops = lambda inputs: 1000  # type: ignore[method-assign]
    for _ in range(2):  # a second training counts anew
        began = time.perf_counter()
        trainer.train()
        took = time.perf_counter() - began
        entries = [row for row in trainer.state.log_history if "loss" in row]
        assert [MFU in row for row in entries] == [False, True, True]
        # 1000 operations in each entry's time, of 1e6 a second.
        assert 0 < sum(1e-3 / row[MFU] for row in entries[1:]) < took
