"""Frozen home shards leave the device once the host has a copy, and no number changes."""

from __future__ import annotations

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.core.params.home_shard import HomeShard
from tests.device.choice import seeded
from tests.distributed.beside import Beside, named, whole
from tests.distributed.jobs import WORKS, Job, Verdicts, asked, rows, run_jobs
from tests.distributed.models import CASES, Case, odd_lora
from tests.distributed.parity import values
from tests.distributed.ranks import run
from tests.distributed.released import (
    NAMES,
    OPTIONS,
    counting_fingerprints,
    forward,
    frozen_of,
    held_bytes,
    make_pair,
    there,
)

pytestmark = pytest.mark.distributed


def _losses(
    mesh: DeviceMesh, name: str, strategy: str
) -> tuple[list[float], dict[str, Tensor], list[int]]:
    """Losses of a few steps, the last parameters, bytes of frozen shards at first and after each pass."""
    pair = Beside(mesh, CASES[name], options=OPTIONS, strategy=strategy)
    sizes = [sum(map(held_bytes, frozen_of(pair.model).values()))]
    losses = []
    for step in range(4):
        loss = forward(pair, step)
        sizes.append(sum(map(held_bytes, frozen_of(pair.model).values())))
        loss.backward()
        sizes.append(sum(map(held_bytes, frozen_of(pair.model).values())))
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(pair.model), sizes


def _with_and_without(mesh: DeviceMesh, name: str) -> tuple[list[int], list[int]]:
    losses, parameters, sizes = _losses(mesh, name, "fcdp")
    other_losses, other_parameters, other_sizes = _losses(mesh, name, "zero3")
    assert losses == other_losses
    for n, value in parameters.items():
        assert torch.equal(value, other_parameters[n]), n
    return sizes, other_sizes


@pytest.mark.rare
@pytest.mark.parametrize(
    ("name", "nodes", "ranks_per_node"),
    [("odd-lora", 2, 2), ("odd-lora", 2, 1), ("llama-lora", 2, 1), ("odd-lora", 1, 2)],
)
def test_frozen_shards_take_no_memory_and_no_number_changes(
    name: str, nodes: int, ranks_per_node: int
) -> None:
    for sizes, zero3 in run(_with_and_without, name, nodes=nodes, ranks_per_node=ranks_per_node):
        assert sizes == [0] * 9, "after `shard` and after every forward and backward"
        assert zero3 == [zero3[0]] * 9, "the control: they stay under ZeRO-3"
        assert zero3[0] > 0


# --- between a forward and its backward; other kinds of forwards ----------------------------------------


def _between(mesh: DeviceMesh) -> None:
    pair = make_pair(mesh)
    for read in (lambda: values(pair.model), lambda: pair.model.to(torch.float32), lambda: None):
        first, second = forward(pair, 50), forward(pair, 51)
        assert not there(pair.model)
        read()
        first.backward()
        read()
        second.backward()
        pair.plain_backward(50, 51)
        pair.compare_gradients()
        pair.optimize()
    pair.train(2)
    pair.compare_parameters()
    forward(pair)
    _take_apart(pair)


def _take_apart(pair: Beside) -> None:
    """As AOTAutograd does with torch 2.11 in every call, and a compiler before it reads storages."""
    (gate,) = {p._gate for p in frozen_of(pair.model).values()}
    assert gate is not None
    for gate.is_called in (True, False):
        assert not there(pair.model)
        for parameter in frozen_of(pair.model).values():
            parameter.__tensor_flatten__()
    assert there(pair.model)


def _evaluation(mesh: DeviceMesh) -> None:
    pair = make_pair(mesh)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert pair.losses(7)[0] == pytest.approx(pair.losses(7)[1], rel=1e-5)
            assert not there(pair.model)
            for parameter in frozen_of(pair.model).values():
                parameter.full_tensor()  # loads the shard again within the block
            pair.losses(8)
        pair.train(2)
        assert not there(pair.model)
        pair.compare_parameters()
    eager = pair.case.loss(pair.model, pair.data(9))  # gathers shard by shard
    assert eager.item() == pytest.approx(forward(pair, 9).item(), rel=1e-5)
    assert not there(pair.model)


class _Reading(nn.Module):
    """Reads a frozen parameter in the graph without its property, and saves a function of it for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = odd_lora()

    def forward(self, ids: Tensor) -> Tensor:
        norm = self.inner.base_model.model.norm._parameters["weight"]
        found = self.inner(ids)
        if isinstance(norm, HomeShard):
            norm = norm.full_tensor()
        return found * norm.sum()


_READING = Case(model=_Reading, loss=CASES["odd-lora"].loss, vocabulary=CASES["odd"].vocabulary)


def _read_in_a_graph(mesh: DeviceMesh) -> None:
    pair = make_pair(mesh, _READING)
    first, second = forward(pair, 60), forward(pair, 61)
    second.backward()
    first.backward()
    pair.plain_backward(60, 61)
    pair.compare_gradients()
    pair.optimize()
    pair.train(2)
    name = "inner.base_model.model.norm.weight"
    assert set(there(pair.model)) <= {name}, "what no graph reads is away"
    pair.compare_parameters()


def _compiled_caller(mesh: DeviceMesh) -> None:
    """The guards of a compiled function around the model look at shards before the model is called."""
    pair = make_pair(mesh)

    def loss(ids: Tensor) -> Tensor:
        return pair.case.loss(pair.model, ids)

    compiled = torch.compile(loss, backend="fcdp", options=OPTIONS)
    for step in range(20, 23):
        compiled(pair.data(step)).backward()
        pair.plain_backward(step)
        pair.compare_gradients()
        pair.optimize()
    pair.compare_parameters()


def _unfreezing(mesh: DeviceMesh) -> None:
    pair = make_pair(mesh)
    for name in NAMES:
        forward(pair)
        assert not held_bytes(named(pair.model, name))
        for is_trained in (True, False):
            for model in pair.both:
                named(model, name).requires_grad_(is_trained)
            pair.use(lambda parameters: torch.optim.SGD(parameters, lr=0.01))
            pair.train(2)
            assert not there(pair.model)
            pair.compare_parameters()


def _two_models(mesh: DeviceMesh) -> None:
    first = make_pair(mesh)
    second = make_pair(mesh)  # resets Dynamo: the first model's graphs compile again
    for pair in (first, second, first):
        pair.train(1)
        assert not there(pair.model)
        pair.compare_parameters()
    forward(first)
    del second, pair
    parameter = named(first.model, "first.base_layer.weight")
    expected = named(first.plain, "first.base_layer.weight")
    del first  # the parameter's shard is still loaded from its model's host copy
    assert not held_bytes(parameter)
    assert torch.equal(whole(parameter), expected)


def _of_less_precision(mesh: DeviceMesh) -> None:
    """A bucket gathered in bf16 has no copy of an fp32 shard."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fcdp_compile.shard(CASES["odd-lora"].model(), mesh, param_dtype=torch.bfloat16)
    net = torch.compile(model, backend="fcdp", options=OPTIONS)
    for step in range(2):
        ids = torch.randint(0, 17, (2, 16), generator=seeded(step))
        CASES["odd-lora"].loss(net, ids).backward()
    assert there(model) == [n for n, p in frozen_of(model).items() if p.held.numel()]


def _no_fingerprints(mesh: DeviceMesh) -> None:
    pair = make_pair(mesh)
    forward(pair)
    with counting_fingerprints() as taken:
        forward(pair)
        assert not taken, "nothing can have been written to what nobody has seen"
        values(pair.model)
        assert taken, "what is handed out is marked"
        assert set(taken) == {"broken"}
        taken.clear()
        forward(pair)
        # Those whose transfer starts early (`runtime.seams`), and then the rest, all at once.
        assert taken in (["compared"], ["compared"] * 2)
        taken.clear()
        forward(pair)
        assert not taken


def _saving_and_loading(mesh: DeviceMesh) -> None:
    """Neither brings a shard back: the whole base may be larger than the GPUs."""
    pair = make_pair(mesh)
    forward(pair)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    fcdp_compile.save(f"{folders[0]}/saved", pair.model)
    fcdp_compile.save_pretrained(pair.model, f"{folders[0]}/pretrained")
    with fcdp_compile.gathered(pair.model):
        pass
    assert not there(pair.model)
    expected = values(pair.model)  # brings them back
    with torch.no_grad():
        for parameter in pair.model.parameters():
            parameter.zero_()
    forward(pair)
    fcdp_compile.load(f"{folders[0]}/saved", pair.model)
    assert not there(pair.model)
    found = values(pair.model)
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name
    forward(pair)
    with fcdp_compile.gathered(pair.model, writeback=True):
        named(pair.model, NAMES[0]).mul_(2)
    named(pair.plain, NAMES[0]).mul_(2)
    assert not there(pair.model)
    pair.train(2)
    forward(pair).backward()
    torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1e-3)
    assert not there(pair.model)


_JOBS: dict[str, Job] = {
    "saving and loading": _saving_and_loading,
    "between forward and backward": _between,
    "evaluation": _evaluation,
    "a graph that reads a shard": _read_in_a_graph,
    "a compiled caller": _compiled_caller,
    "unfreezing": _unfreezing,
    "two models": _two_models,
    "less precision": _of_less_precision,
    "fingerprints": _no_fingerprints,
}


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    return run_jobs(asked(request, _JOBS), nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("job", rows(_JOBS, slow=_JOBS))
def test_released_shards_and(verdicts: Verdicts, job: str) -> None:
    assert [v[job] for v in verdicts] == [WORKS] * 4


@pytest.mark.rare
def test_released_shards_on_one_node() -> None:
    for verdict in run_jobs(_JOBS, nodes=1, ranks_per_node=2):
        assert verdict == dict.fromkeys(_JOBS, WORKS)


@pytest.mark.rare
def test_unfreezing_with_one_rank_a_node() -> None:
    for verdict in run_jobs({"unfreezing": _unfreezing}, nodes=2, ranks_per_node=1):
        assert verdict == {"unfreezing": WORKS}
