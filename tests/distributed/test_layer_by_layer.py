"""`layer.compile(backend="fcdp")`: equal layers share a trace, and train as without fcdp."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import fcdp_compile
from fcdp_compile.core.params.late import LateTensor
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.runtime.seams import Seams
from fcdp_compile.torch_compat.distributed import calls_dispatch_of_subclasses
from tests.device.choice import seeded
from tests.distributed.beside import Beside, assert_close, sgd
from tests.distributed.layered import VOCABULARY, Model
from tests.distributed.models import Case, with_lora
from tests.distributed.parity import fresh
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

LAYERS = 3


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _model() -> nn.Module:
    return Model(LAYERS, 0.0)


def _checkpointed() -> nn.Module:
    return Model(LAYERS, 0.0, checkpointed=True)


def _lora() -> nn.Module:
    return with_lora(_model(), "mix", "out")


def _tied() -> nn.Module:
    """The last layer has a weight of the first."""
    model = _model()
    layers: Any = model.layers
    layers[-1].up.weight = layers[0].up.weight
    return model


def _odd_one() -> nn.Module:
    """The second layer is frozen, so that its trace is another one."""
    model = _model()
    layers: Any = model.layers
    layers[1].requires_grad_(False)
    return model


CASES = {
    f.__name__.strip("_"): Case(model=f, loss=_loss, vocabulary=VOCABULARY)
    for f in (_model, _checkpointed, _lora, _tied, _odd_one)
}


class Layered(Beside):
    """A pair whose sharded model has each layer compiled on its own, and nothing else."""

    def compiled(self, model: nn.Module) -> Any:
        layers: Any = named_layers(model)
        for layer in layers:
            layer.compile(backend="fcdp", options=self.options)
        return model


def named_layers(model: nn.Module) -> Any:
    """The list of layers, in the base of an adapted model."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)


@dataclass(frozen=True)
class Trained:
    """What a run did: graphs that Dynamo traced, plans, transfers that started early, and the bytes that the
    last step has moved, by kind.
    """

    traces: int
    plans: int
    early: int
    bytes: dict[str, int]


def _train(
    mesh: DeviceMesh, case: str, strategy: str, kind: type[Beside], **options: Any
) -> Trained:
    fresh()
    torch._dynamo.utils.counters.clear()
    pair = kind(mesh, CASES[case], strategy=strategy, options={"compute": "eager", **options})
    seams = state_of(pair.model).seams
    taken: list[bool] = []

    def take(*args: Any) -> Any:
        found = Seams.take(seams, *args)
        taken.append(found is not None)
        return found

    seams.take = take  # type: ignore[method-assign]
    for step in range(2):
        for last in (False, True):  # micro-batches
            with nullcontext() if last or step == 0 else fcdp_compile.no_sync(pair.model):
                pair.case.loss(pair.net, pair.data(pair.step)).backward()
            pair.plain_backward(pair.step)
            pair.step += 1
        pair.compare_gradients()
        pair.optimize()
    pair.train(2)
    pair.compare_parameters()
    return Trained(
        traces=int(torch._dynamo.utils.counters["stats"]["unique_graphs"]),
        plans=len(state_of(pair.model).plans),
        early=sum(taken),
        bytes={k: n for k, n in pair.counters.last_step.items() if n and k != "agree"},
    )


def _train_all(mesh: DeviceMesh, trials: list[tuple[str, str, bool]], folder: str) -> list[Trained]:
    results = []
    for case, strategy, is_compared in trials:
        mine = _train(mesh, case, strategy, Layered)
        results.append(mine)
        if is_compared:  # with dumps, every layer goes through the passes
            assert mine == _train(mesh, case, strategy, Layered, dump=folder), (case, strategy)
        if strategy != "zero3":  # which gathers at every use outside of graphs
            whole = _train(mesh, case, strategy, Beside)
            # Every graph reduces its own gradient of a tied weight.
            kind = "inter_all_gather" if case == "tied" else "inter"
            between = [{k: n for k, n in t.bytes.items() if kind in k} for t in (mine, whole)]
            assert between[0] == between[1], (case, strategy)
    return results


TRIALS = [
    ("model", "fcdp", True),
    *(("model", s, False) for s in ("zero3", "mics")),
    ("checkpointed", "fcdp", False),
    ("lora", "fcdp", False),
    ("tied", "fcdp", True),
    ("odd_one", "fcdp", False),
]
"""A model, a strategy, and whether to compare with plans that the passes make for each layer."""


@pytest.mark.rare
def test_equal_layers_share_a_trace(tmp_path: Path) -> None:
    for of_rank in run(_train_all, TRIALS, str(tmp_path), nodes=2, ranks_per_node=1):
        for (case, strategy, _), found in zip(TRIALS, of_rank, strict=True):
            # The first layer with adapters gets an input that needs no gradient.
            traces = 2 if case in ("lora", "odd_one") else 1
            assert (found.traces, found.plans) == (traces, LAYERS), f"{case}, {strategy}"
            assert found.early or strategy == "mics", f"{case}, {strategy}"


class Thin(nn.Module):
    """Layers with a bias that is smaller than the number of ranks, so that a rank has nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8)) for _ in range(LAYERS)]
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.one_hot(ids, 8).float()
        for layer in self.layers:
            x = x + layer(x)
        return x


def _other_strategy(mesh: DeviceMesh) -> int:
    """A layer that differs from the others in nothing but its strategy."""
    fresh()
    torch._dynamo.utils.counters.clear()
    strategies = {"layers.1": "zero3"}
    options = {"compute": "eager"}
    pair = Layered(mesh, CASES["model"], module_strategies=strategies, options=options)
    pair.train(3)
    pair.compare_parameters()
    found = {b.strategy.name for p in state_of(pair.model).plans.values() for b in p.buckets}
    assert found == {"fcdp", "zero3"}
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_layer_with_another_strategy_has_a_trace_of_its_own() -> None:
    assert run(_other_strategy, nodes=2, ranks_per_node=1) == [2, 2]


def _given(mesh: DeviceMesh) -> None:
    """One layer is called with other values, before and after calls with its own."""
    fresh()
    pair = Layered(mesh, Case(model=Thin, loss=_loss, vocabulary=8), options={"compute": "eager"})
    x = torch.randn(2, 5, 8, generator=seeded(pair.rank))
    every = [n for n, _ in named_layers(pair.plain)[0].named_parameters()]
    with torch.no_grad():
        for factor, i in product((0.5, 1.0), (2, 0, 1)):
            mine, plain = (named_layers(m)[i] for m in pair.both)
            for names in (["0.bias"], ["1.weight"], every):
                values = [
                    {n: m.get_parameter(n).detach() * factor for n in names} for m in (mine, plain)
                ]
                found = functional_call(mine, values[0], (x,))
                assert_close(found, functional_call(plain, values[1], (x,)), f"layer {i}, {names}")
    pair.train(2)
    pair.compare_parameters()


@pytest.mark.slow
def test_other_values_in_the_place_of_a_layers_parameters() -> None:
    run(_given, nodes=2, ranks_per_node=2)


def _frozen_first() -> nn.Module:
    """The first layer to run backward is not the first to run forward."""
    model = Model(LAYERS, 0.0)
    model.embedding.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


class Indexed(nn.Module):
    """Layers that fail for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Biased() for _ in range(LAYERS)])

    def forward(self, x: Tensor, ids: Sequence[Tensor]) -> Tensor:
        for layer, i in zip(self.layers, ids, strict=True):
            x = layer(x, i)
        return x


class Biased(nn.Module):
    """A layer with a table of biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.table = nn.Linear(8, 8), nn.Embedding(4, 8)

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        result: Tensor = self.up(x) + self.table(i)
        return result


def _one_rank_alone(mesh: DeviceMesh, strategy: str) -> None:
    """One rank skips an optimizer's step; an input fails on one rank; layers go."""
    options = {"compute": "eager"}
    fresh()
    case = Case(model=_frozen_first, loss=_loss, vocabulary=VOCABULARY)
    pair = Layered(mesh, case, strategy=strategy, options=options)
    for step in range(3):
        pair.case.loss(pair.net, pair.data(step)).backward()
        if step or pair.rank:
            pair.optimizer.step()
        pair.optimizer.zero_grad()
    pair.forget_rounding()
    pair.train()

    fresh()
    case = Case(model=Indexed, loss=_loss, vocabulary=1)
    pair = Layered(mesh, case, strategy=strategy, options=options)
    x, good, bad = torch.randn(2, 8), torch.tensor([1, 2]), torch.tensor([1, 99])
    for step in range(6):
        last = bad if step == 3 and not pair.rank else good
        with torch.no_grad(), nullcontext() if last is good else pytest.raises(IndexError):
            found = pair.model(x, [good, good, last])
            assert_close(found, pair.plain(x, [good] * LAYERS), f"after a failure, {step}")

    fresh()
    pair = Layered(mesh, CASES["model"], strategy=strategy, options=options)
    pair.train(2)
    for model in pair.both:
        del model.layers[1]
    pair.use(sgd)
    pair.train(2)
    pair.compare_parameters()


def _troubles(mesh: DeviceMesh) -> None:
    for strategy in ("fcdp", "zero3"):
        _one_rank_alone(mesh, strategy)


@pytest.mark.cpu  # kernels of a device raise later
@pytest.mark.slow
def test_what_one_rank_alone_notices_lets_ranks_start_the_same() -> None:
    run(_troubles, nodes=2, ranks_per_node=1)


class _StopHereError(Exception):
    """Raised by a hook in the middle of a backward."""


def _is_late(parameter: nn.Parameter) -> bool:
    """Whether the reduction of a parameter's gradient has not ended; asks without waiting for it."""
    grad = Tensor.grad.__get__(parameter)  # type: ignore[attr-defined]  # a descriptor, contrary to torch's types
    return type(DTensor.__dict__["_local_tensor"].__get__(grad)) is LateTensor


def _doubled(grad: Tensor) -> Tensor:
    if isinstance(grad, DTensor):
        assert type(grad.to_local()) is type(grad._local_tensor) is Tensor
    return grad * 2


def _look_at_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    assert parameter.grad.norm().isfinite()


def _late_gradients(mesh: DeviceMesh) -> None:
    """Gradients are read by hooks, added to, taken by `autograd.grad`, and left by a backward that fails."""
    fresh()
    pair = Layered(mesh, CASES["model"], options={"compute": "eager"})
    first, second = (named_layers(pair.model)[i].up.weight for i in (0, 1))
    seen: list[bool] = []

    def look(module: nn.Module, args: Any, result: Tensor) -> None:
        result.register_hook(lambda grad: seen.append(_is_late(second)))

    handle = named_layers(pair.model)[0].register_forward_hook(look)
    pair.train(2)
    handle.remove()
    # The first backward shows what memory a gradient has; torch 2.11 reads it when it detaches it.
    assert seen == [False, calls_dispatch_of_subclasses()]

    pair.case.loss(pair.net, pair.data(2)).backward()
    grads = [p.grad for p in pair.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(grads, copy.deepcopy(grads), strict=True))
    with torch.no_grad():  # traces the layers again, while there are gradients
        pair.losses(2)
    pair.optimizer.zero_grad()

    for model in pair.both:  # two backwards, of which the second adds to what is there
        layers = named_layers(model)
        layers[1].up.weight.register_hook(_doubled)
        layers[1].down.weight.register_post_accumulate_grad_hook(_look_at_gradient)
    for step in (2, 3):
        pair.case.loss(pair.net, pair.data(step)).backward()
        assert not _is_late(first)
        assert not _is_late(second)
        pair.plain_backward(step)
    pair.compare_gradients()
    pair.optimize()

    weights = [[n.up.weight for n in named_layers(m)] for m in pair.both]
    mine = torch.autograd.grad(pair.case.loss(pair.net, pair.data(4)), weights[0])
    plain = pair.case.loss(pair.plain, pair.data(4, 0)) + pair.case.loss(
        pair.plain, pair.data(4, 1)
    )
    assert all(type(g.to_local()) is Tensor for g in mine)  # type: ignore[attr-defined]
    for found, expected in zip(mine, torch.autograd.grad(plain / 2, weights[1]), strict=True):
        assert_close(found.full_tensor(), expected, "autograd.grad")  # type: ignore[attr-defined]

    def stop(grad: Tensor) -> None:
        raise _StopHereError

    handle = first.register_hook(stop)
    with pytest.raises(_StopHereError):
        pair.case.loss(pair.net, pair.data(5)).backward()
    handle.remove()
    assert second.grad.full_tensor().isfinite().all()
    pair.optimizer.zero_grad()
    pair.train(2)
    pair.compare_parameters()


@pytest.mark.slow
def test_gradients_that_are_still_reduced_are_right_whoever_reads_them() -> None:
    run(_late_gradients, nodes=2, ranks_per_node=1)
