"""Other strategies for some modules of a model, and parameters that no strategy has."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.strategy import Strategy
from tests import formulas
from tests.distributed.beside import Beside, assert_close, whole
from tests.distributed.models import CASES
from tests.distributed.ranks import run
from tests.distributed.test_bytes import MOVING, formula_model

pytestmark = pytest.mark.distributed

MIXES: list[tuple[str, str, dict[str, str]]] = [
    ("odd", "fcdp", {"embedding": "ddp", "first": "zero3", "second": "mics"}),
    ("odd", "zero++", {"embedding": "zero1", "norm": "fcdp", "second": "zero3+ho_ring"}),
    (
        "llama-lora",
        "zero3",
        {
            "base_model.model.model.embed_tokens": "ddp",
            "base_model.model.model.layers.*.mlp": "fcdp",
            "base_model.model.model.layers.*.self_attn.q_proj": "zero2",
            "base_model.model.model.layers.0": "zero++",
        },
    ),
]


def _train(mesh: DeviceMesh, case: str, strategy: str, mix: dict[str, str]) -> None:
    pair = Beside(mesh, CASES[case], strategy=strategy, module_strategies=mix)
    for _ in range(3):
        pair.case.loss(pair.net, pair.data(pair.step)).backward()
        pair.plain_backward(pair.step)
        pair.compare_gradients()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in pair.both]
        assert_close(whole(norms[0]), norms[1], "norm of the gradients")
        pair.optimize()
        pair.step += 1
    with torch.no_grad():
        loss, expected = pair.losses(pair.step)
        assert_close(loss, expected, "evaluation")
    for i in range(3):
        with fcdp_compile.no_sync(pair.net) if i < 2 else nullcontext():
            pair.case.loss(pair.net, pair.data(i)).backward()
        pair.plain_backward(i)
    pair.compare_gradients()
    pair.optimize()
    pair.case.loss(pair.model, pair.data(pair.step)).backward()  # not compiled
    pair.plain_backward(pair.step)
    pair.compare_gradients()
    pair.optimize()
    pair.compare_parameters()


def _train_all(mesh: DeviceMesh) -> None:
    for case, strategy, mix in MIXES:
        _train(mesh, case, strategy, mix)


def test_numbers() -> None:
    run(_train_all, nodes=2, ranks_per_node=2)


def test_numbers_on_one_node() -> None:
    mix = {"embedding": "zero1", "first": "zero3", "second": "ddp"}
    run(_train, "odd", "fcdp", mix, nodes=1, ranks_per_node=2)


def _measure(mesh: DeviceMesh, mix: dict[str, str]) -> list[dict[str, int]]:
    torch._dynamo.config.recompile_limit = 64
    options = {"bucket_mb": 0.1 / 2**20}
    pair = Beside(mesh, CASES["odd"], strategy="fcdp", module_strategies=mix, options=options)
    steps = []
    for step in range(2):
        before = dict(pair.counters.sent)
        pair.case.loss(pair.net, pair.data(step)).backward()
        sent = {k: n - before.get(k, 0) for k, n in pair.counters.sent.items() if k in MOVING}
        steps.append({k: n for k, n in sent.items() if n})
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    return steps


def test_every_parameter_moves_what_its_strategy_says() -> None:
    mix = {"embedding": "ddp", "first": "zero3", "second": "mics", "norm": "zero1"}
    model = formula_model("odd", together=False)
    found = run(_measure, mix, nodes=2, ranks_per_node=2)
    for number in range(2):
        expected: Counter[str] = Counter()
        for bucket in model.buckets:
            strategy = mix.get(bucket[0].partition(".")[0], "fcdp")
            part = formulas.Model(
                shapes=model.shapes,
                trainable=model.trainable,
                backward=model.backward,
                buckets=[bucket],
            )
            moved = formulas.training_step(part, strategy, 2, 2, first=number == 0)
            expected.update(moved.bytes)
        assert [steps[number] for steps in found] == [dict(expected)] * 4


def _bad(mesh: DeviceMesh) -> list[str]:
    attempts: list[tuple[str, dict[str, Any]]] = [
        ("odd", {"module_strategies": {"frist": "ddp"}}),
        ("odd", {"module_strategies": {"f*": "ddp", "first": "zero3"}}),
        ("gpt2", {"module_strategies": {"lm_head": "ddp"}}),
        ("odd", {"module_strategies": {"first": "dpp"}}),
        ("odd", {"ignored_params": [nn.Parameter(torch.ones(3))]}),
        ("odd", {"ignored_params": ["first.weight"]}),
        ("odd", {"buffer_dtype": torch.int8}),
    ]
    messages = []
    for case, options in attempts:
        with pytest.raises((ValueError, TypeError)) as info:
            fcdp_compile.shard(CASES[case].model(), mesh, **options)
        messages.append(str(info.value))
    return messages


def test_bad_input() -> None:
    expected = [
        "names 'frist', but the model has no such module; did you mean 'first'?",
        "module 'first' gets strategy 'ddp' from 'f*' and 'zero3' from 'first'",
        "'transformer.wte.weight' and 'lm_head.weight' are tied, but module_strategies gives them 'fcdp' and",
        "unknown strategy 'dpp'",
        "a parameter of shape (3,) that the model does not have",
        "must be parameters of the model, not str",
        "buffer_dtype must be a floating point torch.dtype",
    ]
    for messages in run(_bad, nodes=2, ranks_per_node=1):
        for message, part in zip(messages, expected, strict=True):
            assert part in message
            assert "\n" not in message


class _WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 11), nn.SiLU(), nn.Linear(11, 3))
        self.temperature = nn.Parameter(torch.tensor([2.0]))
        self.register_buffer("mean", torch.full((5,), 0.1))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs - self.mean) * self.temperature


def _leave_alone(mesh: DeviceMesh) -> None:
    torch.manual_seed(dist.get_rank())
    model = _WithBuffers()
    left = model.temperature
    with torch.no_grad():
        left.fill_(dist.get_rank() + 1)
    fcdp_compile.shard(model, mesh, ignored_params=[left], buffer_dtype=torch.bfloat16)
    assert model.temperature is left
    assert left.item() == dist.get_rank() + 1, "no copy of rank 0's"
    assert (model.mean.dtype, model.count.dtype) == (torch.bfloat16, torch.int64)
    net = torch.compile(model, backend="fcdp")
    inputs = torch.ones(2, 5) * (dist.get_rank() + 1)
    for either in (model, net):
        out = either(inputs)
        out.sum().backward()
        assert left.grad is not None
        # Its own gradient, which nobody averaged: outputs are multiples of it.
        assert_close(left.grad.sum() * left.item(), out.sum(), "gradient")
        model.zero_grad()
    assert left in set(model.parameters())
    state = model.state_dict()["temperature"]
    assert state.item() == left.item()


def test_parameters_and_buffers_that_are_not_sharded() -> None:
    run(_leave_alone, nodes=2, ranks_per_node=1)


def test_the_printed_form() -> None:
    fcdp = Strategy.parse("fcdp")
    assert str(Strategy.parse("hpz+w8")) == "zero+++w8"
    assert str(fcdp.with_gradients_on("host")) == "fcdp (gradient_on=host)"
    assert str(fcdp.on_one_node(2)).startswith("fcdp (cache=none, ")
