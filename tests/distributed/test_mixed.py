"""Other strategies for some modules of a model, and parameters without a strategy."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile.errors import StaleParameterError
from fcdp_compile.strategy import Strategy
from tests import formulas
from tests.distributed.beside import Beside, assert_close, named, sgd, whole
from tests.distributed.models import CASES
from tests.distributed.ranks import run
from tests.distributed.test_bytes import MOVING, formula_model

pytestmark = [pytest.mark.distributed, pytest.mark.rare]

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
        ("odd", {"module_strategies": {"": "ddp"}}),
        ("odd", {"module_strategies": "ddp"}),
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
        "names 'frist', but no module of the model matches it; did you mean 'first'?",
        "module 'first' gets strategy 'ddp' from 'f*' and 'zero3' from 'first'",
        "'transformer.wte.weight' and 'lm_head.weight' are tied, but module_strategies gives them 'fcdp' and",
        "unknown strategy 'dpp'",
        "names '', the model itself; leave module_strategies out to mean the whole model",
        "must map names of modules to strategies, such as {'model.embed_tokens': 'ddp'}, not 'ddp'",
        "a parameter of shape (3,) that is not in the model",
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
        # The rank's own gradient, not averaged: outputs are multiples of the parameter.
        assert_close(left.grad.sum() * left.item(), out.sum(), "gradient")
        model.zero_grad()
    assert left in set(model.parameters())
    state = model.state_dict()["temperature"]
    assert state.item() == left.item()


def test_parameters_and_buffers_that_are_not_sharded() -> None:
    run(_leave_alone, nodes=2, ranks_per_node=1)


def _ignore(mesh: DeviceMesh) -> None:
    model = CASES["odd"].model()
    left = [model.scale, model.norm.weight, model.norm.bias]
    with pytest.raises(TypeError, match="buffer_dtype"):
        fcdp_compile.shard(
            model, mesh, ignored_params=[model.first.weight], buffer_dtype=torch.int8
        )
    in_any_order = left if dist.get_rank() else left[::-1]  # sets have no order
    fcdp_compile.shard(model, mesh, ignored_params=in_any_order)
    assert [n for n, p in model.named_parameters() if not isinstance(p, DTensor)] == [
        "scale", "norm.weight", "norm.bias",
    ]  # fmt: skip
    other = CASES["odd"].model()
    other.scale = left[0]
    fcdp_compile.shard(other, mesh)
    assert isinstance(other.scale, DTensor), "another model's option"
    tied = CASES["gpt2"].model()
    weight = tied.lm_head.weight
    fcdp_compile.shard(tied, mesh, ignored_params=[weight], module_strategies={"lm_head": "ddp"})
    assert tied.lm_head.weight is tied.transformer.wte.weight is weight


def test_what_is_ignored_follows_from_this_call_alone() -> None:
    run(_ignore, nodes=2, ranks_per_node=1)


def _write_between_forwards(mesh: DeviceMesh) -> None:
    """Only frozen buckets outlive the backward, so no forward stores anything for the next forward."""
    pair = Beside(mesh, CASES["odd"], strategy="zero++", module_strategies={"second": "fcdp"})
    for model in pair.both:
        model.second.requires_grad_(False)
    pair.use(sgd)
    pair.train()
    earlier = pair.case.loss(pair.net, pair.data(0))
    weight = named(pair.model, "first.weight")
    weight.data = whole(weight) * 1.5
    later = pair.case.loss(pair.net, pair.data(1))
    with pytest.raises(StaleParameterError):
        earlier.backward()
    named(pair.plain, "first.weight").data.mul_(1.5)
    later.backward()
    pair.plain_backward(1)
    pair.compare_gradients()


def test_a_write_between_two_forwards_that_only_load() -> None:
    run(_write_between_forwards, nodes=2, ranks_per_node=1)


class _Halves(nn.Module):
    """Two graphs; the second runs on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor, *, in_full: bool) -> torch.Tensor:
        hidden = self.first(inputs).tanh()
        torch._dynamo.graph_break()
        return self.second(hidden).sum() if in_full else hidden.sum()


def _synchronise_by_other_graph(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = _Halves()
    model = fcdp_compile.shard(
        copy.deepcopy(plain), mesh, strategy="fcdp", module_strategies={"first": "zero3"}
    )
    net = torch.compile(model, backend="fcdp")
    inputs = torch.rand(2, 7)
    for in_full in (True, False):
        with fcdp_compile.no_sync(net) if in_full else nullcontext():
            net(inputs, in_full=in_full).backward()
        plain(inputs, in_full=in_full).backward()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert_close(whole(found.grad), expected.grad, name)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_graph_that_lets_nothing_wait_synchronises_what_others_did() -> None:
    run(_synchronise_by_other_graph, nodes=2, ranks_per_node=1)


def test_the_printed_form() -> None:
    fcdp = Strategy.parse("fcdp")
    assert str(Strategy.parse("hpz+w8")) == "zero+++w8"
    assert str(fcdp.with_gradients_on("host")) == "fcdp (gradient_on=host)"
    assert str(fcdp.on_one_node(2)) == "fcdp (gradient=global)"
    assert str(fcdp.on_one_node(1)).startswith("fcdp (cache=none, ")
