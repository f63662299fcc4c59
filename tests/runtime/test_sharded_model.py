"""Records of a sharded model and what it does for optimizers, on an echo group of 2 x 2 ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import FcdpError, PlanMismatchError
from fcdp_compile.plan import Direction
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.validity import Seals
from fcdp_compile.runtime.collectives.agreement import ACCUMULATES, SYNCHRONISES, Question
from fcdp_compile.runtime.collectives.collectives import Collectives, Telling
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.runtime.parameters.home_memory import book
from fcdp_compile.runtime.shared_batches import SharedBatches
from fcdp_compile.torch_compat.distributed import calls_dispatch_of_subclasses
from tests.streams.programs import four_ranks


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with four_ranks():
        yield
        _mesh.cache_clear()


@cache
def _mesh() -> DeviceMesh | None:
    return fcdp_compile.make_mesh(nodes=2)


class Offloaded(NamedTuple):
    """The part of a spec that says how much memory a home shard takes on the host."""

    computes_on: str | None
    home_bytes: int


def _sharded() -> nn.Linear:
    model: nn.Linear = fcdp_compile.shard(nn.Linear(8, 8), _mesh())
    return model


def _buckets_after(net: Any, model: nn.Module) -> Iterable[BoundBucket]:
    """The buckets of a compiled model after its first step."""
    net(torch.rand(2, 8, requires_grad=True)).sum().backward()
    return state_of(model).bound[0].values()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.rand(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_home_shard_is_known_by_its_memory() -> None:
    model = _sharded()
    record = state_of(model).records.by_name["weight"]
    home = record.local()
    assert record.is_home(home)
    assert record.is_home(home.view(home.shape))
    assert record.is_home(home[:0])
    assert not record.is_home(home.clone())
    assert not record.is_home(home[:1])
    records, key = state_of(model).records, record.spec.key
    assert records.keys_at([home]) == (key,)
    assert records.are_at([key], [home])
    for other in (home.clone(), state_of(model).records.by_name["bias"].local()):
        assert not records.are_at([key], [other])


@pytest.mark.parametrize("strategy", ["fcdp", "mics"])
def test_a_write_is_noticed_before_the_next_forward(strategy: str) -> None:
    model = fcdp_compile.shard(nn.Linear(8, 8), _mesh(), strategy=strategy)
    net = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    bucket, *_ = _buckets_after(net, model)
    before = bucket.generation
    net(torch.rand(2, 8, requires_grad=True))
    assert bucket.generation == before
    with torch.no_grad():
        model.weight.add_(1.0)
    net(torch.rand(2, 8, requires_grad=True))
    assert bucket.generation > before


def test_a_copy_that_is_made_anew_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _sharded()
    (bucket,) = _buckets_after(
        torch.compile(model, backend="fcdp", options={"compute": "eager"}), model
    )
    store, wait = BoundBucket.store, Pending.wait
    stored: list[Pending] = []
    waited: list[Pending] = []

    def storing(self: BoundBucket, *args: Any) -> Pending:
        stored.append(store(self, *args))
        return stored[-1]

    def waiting(self: Pending) -> Tensor:
        waited.append(self)
        return wait(self)

    monkeypatch.setattr(BoundBucket, "store", storing)
    monkeypatch.setattr(Pending, "wait", waiting)
    bucket.refresh()
    assert stored[0] in waited


def test_a_parameter_counts_as_changed_until_it_has_been_sealed() -> None:
    model, seals = _sharded(), Seals()
    assert [seals.changed({"w": model.weight}) for _ in range(2)] == [["w"], []]
    with torch.no_grad():
        model.weight.add_(1.0)
    assert [seals.changed({"w": model.weight}) for _ in range(2)] == [["w"], []]


def test_a_step_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.rand(2, 8)).sum().backward()
    monkeypatch.setattr("fcdp_compile.core.params.seals.is_capturing", lambda: True)
    with pytest.raises(FcdpError, match="a CUDA graph that uses sharded parameters"):
        optimizer.step()


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        (
            ACCUMULATES,
            "rank 0 synchronises the gradients of this forward and rank 1 accumulates them",
        ),
        ("saves", "rank 0 runs a compiled graph and rank 1 saves; let every rank do the same"),
    ],
)
def test_what_ranks_do_otherwise_is_told(mode: str, told: str) -> None:
    modes = [SYNCHRONISES, mode]
    collectives: Any = SimpleNamespace(
        tell=lambda words, what: SimpleNamespace(finish=lambda: [1, 1, 0]),
        exchange_texts=lambda text: modes,
    )
    with pytest.raises(PlanMismatchError, match=told):
        Question(collectives, SYNCHRONISES, [True], "a question").agreed()


@pytest.mark.parametrize("strategy", ["fcdp", "zero3", "zero++"])
def test_layers_share_a_trace_if_their_transfers_start_early(strategy: str) -> None:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(4096, 4096), nn.Tanh()) for _ in range(8)]
    model = fcdp_compile.shard(nn.Sequential(*layers), _mesh(), strategy=strategy)
    are_shared = {hasattr(layer, "_fcdp_stands_alone") for layer in model}
    assert are_shared == {strategy != "zero++"}


def test_only_ranks_that_share_parameters_compare_batches() -> None:
    asked: list[list[int]] = []
    collectives: Any = SimpleNamespace(agree=lambda marks, what, group: asked.append(marks) or [])
    for tp, everyone, count in (
        (None, None, 0),
        ("tp", None, 0),
        (None, "all", 0),
        ("tp", "all", 1),
    ):
        topology: Any = SimpleNamespace(tp=tp, everyone=everyone, among_sharers=lambda told: [])
        batches = SharedBatches(topology, collectives)
        asked.clear()
        for _ in range(2):
            batches.compare(Direction.FORWARD, [torch.tensor([1, 2])])
        assert len(asked) == count, "once, where parameters are shared"


@pytest.mark.skipif(
    not calls_dispatch_of_subclasses(),
    reason="operations on home shards are DTensor's own on torch 2.11",
)
def test_an_optimizer_that_communicates_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = _sharded()
    optimizer = torch.optim.Muon([model.weight])
    for _ in range(3):
        _step(model, optimizer)
    assert [r.getMessage()[:30] for r in caplog.records] == ["Muon communicates in its step:"]


def test_whole_moments_are_cut_and_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = nn.Linear(8, 8), _sharded()
    of_plain, of_model = (torch.optim.Adam(m.parameters()) for m in (plain, model))
    _step(plain, of_plain)
    _step(model, of_model)
    said: list[object] = []
    monkeypatch.setattr(dist, "all_gather_object", lambda _, value, **__: said.append(value))
    of_model.load_state_dict(of_plain.state_dict())
    whole, cut = of_plain.state[plain.weight]["exp_avg"], of_model.state[model.weight]["exp_avg"]
    assert isinstance(cut, DTensor)
    assert isinstance(part := cut.to_local(), Tensor)
    assert torch.equal(part, model.weight.part_of(whole))  # type: ignore[attr-defined]
    assert said == []


def test_what_offloaded_parameters_send() -> None:
    model = fcdp_compile.shard(
        nn.Linear(8, 8), fcdp_compile.make_mesh(nodes=2), offload_params=True
    )
    sent = state_of(model).counters.sent
    torch._dynamo.reset()
    net = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    for step in (1, 2):
        net(torch.rand(2, 8)).sum().backward()
        with torch.no_grad():
            model.weight.add_(1.0)
        here = 4 * (8 * 8 + 8) // 4  # of this rank
        assert (sent["load_home"], sent["store_grads"]) == (step * here, step * here)


@pytest.mark.parametrize(
    ("is_pinned", "taken"), [(True, 8192 + 8192 + 64), (False, 4100 + 4100 + 64)]
)
def test_memory_of_offloaded_parameters(is_pinned: bool, taken: int) -> None:
    """The allocator of pinned memory rounds up to a power of two; gradients take as much as shards."""
    asked: list[int] = []
    memory: Any = SimpleNamespace(book=lambda what, size, *_, is_pinned: asked.append(size))
    device: Any = SimpleNamespace(registers=is_pinned)
    held = [("cuda", 4100, True), ("cuda", 64, False), ("cuda", 0, True), (None, 10, True)]
    specs: Any = {Offloaded(*spec): is_trained for *spec, is_trained in held}
    nobody: Any = None
    book(specs, memory, nobody, nobody, device)
    assert asked == [taken]
    assert memory.home_bytes == taken - (taken - 64) // 2


def test_an_optimizer_is_watched_once() -> None:
    model = _sharded()
    optimizer = torch.optim.Adam(model.parameters())
    before = len(optimizer._optimizer_load_state_dict_post_hooks)
    for _ in range(2):
        _step(model, optimizer)
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == before + 1


def test_an_optimizer_is_the_business_of_the_model_that_it_trains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    companion, model, plain = _sharded(), _sharded(), nn.Linear(8, 8)
    of_plain, of_model = (torch.optim.Adam(m.parameters()) for m in (plain, model))
    _step(plain, of_plain)
    asked: list[Collectives] = []
    tell = Collectives.tell

    def told(self: Collectives, *args: Any) -> Telling:
        asked.append(self)
        return tell(self, *args)

    monkeypatch.setattr(Collectives, "tell", told)
    _step(model, of_model)
    of_model.load_state_dict(of_plain.state_dict())
    _step(model, of_model)
    assert companion.weight.grad is None
    assert set(asked) == {state_of(model).collectives}


@pytest.mark.parametrize(("dtype", "warnings"), [(None, 1), (torch.bfloat16, 0)])
def test_differences_of_wide_weights_are_warned_of(
    dtype: torch.dtype | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = fcdp_compile.shard(
        nn.Linear(8, 8), _mesh(), strategy="fcdp+delta", param_dtype=dtype
    )
    net: Any = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    _buckets_after(net, model)
    with torch.no_grad():
        net(torch.rand(3, 8))  # another graph
    assert caplog.text.count("trains ('weight', …) in float32, as they are") == warnings
