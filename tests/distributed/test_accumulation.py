"""`no_sync`: micro-batches whose gradients stay within the node give the same result as without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile import FcdpError, PlanMismatchError, UnsynchronizedGradientError
from fcdp_compile.torch_compat.compilers import why_no_inductor
from tests.device.choice import seeded
from tests.distributed.beside import Beside, assert_close, sgd
from tests.distributed.models import CASES, batch
from tests.distributed.parity import rank_and_ranks
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

STEPS, MICRO_BATCHES = 3, 3


def _micro_batches(pair: Beside, count: int = MICRO_BATCHES) -> None:
    """Accumulate the gradients of `count` micro-batches on both sides."""
    for i in range(count):
        last = i == count - 1
        with nullcontext() if last else fcdp_compile.no_sync(pair.net):
            loss = pair.case.loss(pair.net, pair.data(pair.step))
            loss.backward()
        pair.plain_backward(pair.step)
        pair.step += 1


def _train(mesh: DeviceMesh, case: str, strategy: str, gradient_on: str) -> dict[str, int]:
    """Returns the bytes, by kind, that an optimizer step after the first has moved."""
    pair = Beside(mesh, CASES[case], strategy=strategy, gradient_on=gradient_on)
    for _ in range(STEPS):
        _micro_batches(pair)
        pair.compare_gradients()
        pair.optimize()
    pair.compare_parameters()
    return {k: n for k, n in pair.counters.last_step.items() if n}


def _train_all(mesh: DeviceMesh, trials: list[tuple[str, str, str]]) -> list[dict[str, int]]:
    return [_train(mesh, *trial) for trial in trials]


TRIALS = [
    ("odd", "fcdp", "auto"),
    ("odd", "fcdp", "host"),
    ("odd", "zero1", "auto"),
    ("odd", "zero3", "auto"),
    ("odd", "ddp", "auto"),
    ("odd", "mics", "auto"),
    ("odd", "paro-nni", "auto"),
    ("odd-lora", "fcdp", "host"),
    ("odd-lora", "zero3", "auto"),
    ("odd-lora", "mics", "auto"),
    ("broken", "fcdp", "auto"),
    ("broken", "zero3", "auto"),
]
"""A model, a strategy, and where its gradients accumulate."""


@pytest.fixture(scope="module")
def moved() -> dict[tuple[str, str, str], dict[str, int]]:
    found = run(_train_all, TRIALS, nodes=2, ranks_per_node=2)
    return dict(zip(TRIALS, found[0], strict=True))


_ELSEWHERE = {
    (1, 2): [("odd", "fcdp", "auto"), ("broken", "zero1", "auto"), ("odd-lora", "ddp", "auto")],
    (3, 1): [("broken", "fcdp", "host"), ("odd", "zero1", "auto"), ("odd-lora", "mics", "auto")],
}


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node"), [(1, 2), pytest.param(3, 1, marks=pytest.mark.rare)]
)
def test_gradients_and_parameters_are_those_of_replicated_training(
    nodes: int, ranks_per_node: int
) -> None:
    """Sizes other than 2 x 2, whose runs the other tests read."""
    trials = _ELSEWHERE[nodes, ranks_per_node]
    run(_train_all, trials, nodes=nodes, ranks_per_node=ranks_per_node)


@pytest.mark.slow
def test_what_crosses_between_nodes(moved: dict[tuple[str, str, str], dict[str, int]]) -> None:
    """An optimizer step gathers once and reduces once, for any number of micro-batches."""
    for (case, strategy, place), mine in moved.items():
        if strategy not in ("fcdp", "zero1"):
            continue
        every = moved[case, "zero3", "auto"]
        where = f"{case}, {strategy}, {place}"
        assert mine["inter_reduce_scatter"] * MICRO_BATCHES == every["inter_reduce_scatter"], where
        if case != "broken":  # its two graphs share gathers, but each reduces
            assert mine["inter_all_gather"] == mine["inter_reduce_scatter"], where


@pytest.mark.slow
def test_what_crosses_between_copies(moved: dict[tuple[str, str, str], dict[str, int]]) -> None:
    """If every node has a copy, gradients are all-reduced once and nothing is gathered between nodes."""
    for (case, strategy, _), mine in moved.items():
        if strategy not in ("ddp", "mics", "paro-nni"):
            continue
        assert "inter_all_gather" not in mine
        assert "inter_reduce_scatter" not in mine
        sharded = moved[case, "fcdp", "host"]
        once = sharded["inter_all_gather"] + sharded["inter_reduce_scatter"]
        assert abs(mine["inter_all_reduce"] - once) < 0.2 * once, "but for padding the same"


@pytest.mark.slow
def test_what_stays_within_a_node(moved: dict[tuple[str, str, str], dict[str, int]]) -> None:
    """With fcdp every micro-batch is reduced within the node; with whole gradients only their sum is."""
    every = moved["odd", "zero3", "auto"]["intra_reduce_scatter"]
    assert moved["odd", "fcdp", "auto"]["intra_reduce_scatter"] == every
    assert moved["odd", "zero1", "auto"]["intra_reduce_scatter"] * MICRO_BATCHES == every


@pytest.mark.slow
def test_what_waits_on_the_host(moved: dict[tuple[str, str, str], dict[str, int]]) -> None:
    """Gradients are stored after every micro-batch but the last, and loaded for every one but the first."""
    node_shard = moved["odd", "fcdp", "host"]["intra_reduce_scatter"]  # g - 1 = 1 of them each time
    for kind in ("accumulate", "collect"):
        assert moved["odd", "fcdp", "host"][kind] * MICRO_BATCHES == node_shard * (
            MICRO_BATCHES - 1
        )
        assert kind not in moved["odd", "fcdp", "auto"]


def _train_by_inductor(mesh: DeviceMesh) -> None:
    pair = Beside(mesh, CASES["floats"], options={"compute": "inductor"})
    _micro_batches(pair)
    pair.compare_gradients()


@pytest.mark.skipif(bool(why_no_inductor("cpu")), reason=f"{why_no_inductor('cpu')}")
@pytest.mark.slow
def test_variants_that_are_lowered_later_are_lowered_for_inductor_too() -> None:
    """Inductor decomposes the padding of gradients into ops that depend on no tensor."""
    run(_train_by_inductor, nodes=2, ranks_per_node=1)


def _short_of_host_memory(mesh: DeviceMesh) -> dict[int, dict[str, int]]:
    """The bytes of an optimizer step with room for the cache, and for all or some of the gradients."""
    found = {}
    for waiting in (2, 1):
        options = {"bucket_mb": 0.1 / 2**20, "host_memory": _NODE_BYTES * (2 + waiting)}
        pair = Beside(mesh, CASES["odd"], strategy="fcdp", options=options)
        _micro_batches(pair)
        pair.compare_gradients()
        pair.optimize()
        pair.compare_parameters()
        found[waiting] = dict(pair.counters.last_step)
        del pair  # its share of the host memory is the next one's
    _recompile_on_one_rank(mesh)
    _recompile_without_room(mesh)
    return found


class _InTwoGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.trained = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(x))
        torch._dynamo.graph_break()
        found: Tensor = self.trained(hidden)
        return found


def _recompile_without_room(mesh: DeviceMesh) -> None:
    """A rank that recompiles alone runs the same variants as others, whose plans found no room before."""
    torch.manual_seed(0)
    plain = _InTwoGraphs()
    model = fcdp_compile.shard(copy.deepcopy(plain), mesh, strategy="fcdp")
    options = {"bucket_mb": 0.1 / 2**20, "host_memory": 864}  # bytes of the node shards alone
    net = torch.compile(model, backend="fcdp", options=options)
    optimizers = [sgd([p for p in m.parameters() if p.requires_grad]) for m in (model, plain)]
    rank, ranks = rank_and_ranks(mesh)

    def inputs(number: int, rank: int) -> Tensor:
        size = 3 if number >= 7 and not rank else 2
        return torch.rand(size, 8, generator=seeded(100 * number + rank))

    for number in range(9):
        with fcdp_compile.no_sync(net) if number % 3 < 2 else nullcontext():
            net(inputs(number, rank)).square().mean().backward()
        for other in range(ranks):
            (plain(inputs(number, other)).square().mean() / ranks).backward()
        if number % 3 == 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        assert_close(fcdp_compile.full(model.get_parameter(name)), parameter, name)


def _recompile_on_one_rank(mesh: DeviceMesh) -> None:
    """Gradients with a place keep it in every graph: other ranks wait for their reductions."""
    options = {"bucket_mb": 0.1 / 2**20, "host_memory": _NODE_BYTES * 4}
    pair = Beside(mesh, CASES["odd"], strategy="fcdp", options=options)

    def data(step: int, rank: int | None = None) -> Tensor:
        rank = pair.rank if rank is None else rank
        return batch(pair.case, step=step, rank=rank, size=3 if step and not rank else 2)

    pair.data = data  # type: ignore[method-assign]  # of this pair alone
    for _ in range(2):
        _micro_batches(pair)
        pair.compare_gradients()
        pair.optimize()


_NODE_BYTES = 776
"""Bytes of each rank's node shards of "odd", and of its gradients in fp32."""


@pytest.mark.slow
def test_gradients_that_host_memory_has_no_room_for_are_reduced_every_time() -> None:
    for found in run(_short_of_host_memory, nodes=2, ranks_per_node=2):
        all_wait, some_wait = (found[n]["inter_reduce_scatter"] for n in (2, 1))
        assert all_wait < some_wait < MICRO_BATCHES * all_wait
        assert {f["inter_all_gather"] for f in found.values()} == {found[2]["inter_all_gather"]}


# --- clearing and misuse ------------------------------------------------------------------------------


def _backward(pair: Beside, *, plain: bool = True) -> None:
    pair.case.loss(pair.net, pair.data(pair.step)).backward()
    if plain:
        pair.plain_backward(pair.step)
    pair.step += 1


def _cleared(mesh: DeviceMesh, place: str) -> None:
    pair = Beside(mesh, CASES["odd"], strategy="fcdp", gradient_on=place)
    optimizers = pair.optimizer, pair.plain_optimizer

    def clear(*, set_to_none: bool, only: str = "") -> None:
        for model in pair.both:
            for name, parameter in model.named_parameters():
                if only in name and parameter.grad is not None:
                    if set_to_none:
                        parameter.grad = None
                    else:
                        parameter.grad.zero_()

    def check(what: str) -> None:
        _backward(pair)
        try:
            pair.compare_gradients()
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None
        pair.optimize()

    with fcdp_compile.no_sync(pair.model):
        _backward(pair)
    check("not cleared")
    for set_to_none in (True, False):
        for only in (
            "",
            "first",
        ):  # all gradients, and some of those that share a bucket with others
            with fcdp_compile.no_sync(pair.model):
                _backward(pair)
            clear(set_to_none=set_to_none, only=only)
            with fcdp_compile.no_sync(pair.model):
                _backward(pair)
            check(f"cleared {only}, set_to_none={set_to_none}")
            # Gradients synchronised before are cleared, too.
            _backward(pair)
            with fcdp_compile.no_sync(pair.model):
                _backward(pair)
            clear(set_to_none=set_to_none, only=only)
            check(f"cleared {only} after a synchronised one, set_to_none={set_to_none}")
    # All is cleared, so the step is not refused.
    with fcdp_compile.no_sync(pair.model):
        _backward(pair)
    for optimizer in optimizers:
        optimizer.zero_grad()
        optimizer.step()
    check("after a step without gradients")
    # Between a forward and its backward.
    with fcdp_compile.no_sync(pair.model):
        _backward(pair)
    loss = pair.case.loss(pair.net, pair.data(pair.step))
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    pair.plain_backward(pair.step)
    pair.compare_gradients()


@pytest.mark.parametrize("place", ["gpu", "host"])
@pytest.mark.slow
def test_clearing_gradients_clears_what_waits(place: str) -> None:
    run(_cleared, place, nodes=2, ranks_per_node=2)


def _raises(kind: type[Exception], act: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)


def _misuse(mesh: DeviceMesh) -> dict[str, str]:
    found = {}
    pair = Beside(mesh, CASES["odd"], strategy="fcdp")
    for model in pair.both:
        with nullcontext() if model is pair.plain else fcdp_compile.no_sync(model):
            pass
    with fcdp_compile.no_sync(pair.model):
        _backward(pair)
    before = [p.detach().clone() for p in pair.model.parameters()]
    found["step"] = _raises(UnsynchronizedGradientError, pair.optimizer.step)
    assert all(
        torch.equal(a.to_local(), b.to_local())
        for a, b in zip(before, pair.model.parameters(), strict=True)
    )
    _backward(pair)
    pair.compare_gradients()
    pair.optimize()  # the refused step did no harm

    _backward(pair)
    with fcdp_compile.no_sync(pair.model):
        _backward(pair)
    torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 1e-6)
    found["changed"] = _raises(FcdpError, lambda: _backward(pair, plain=False))
    pair.optimizer.zero_grad()
    pair.plain_optimizer.zero_grad()
    _backward(pair)
    pair.compare_gradients()
    pair.optimize()

    handle = next(pair.model.parameters()).register_hook(lambda g: g * 2)
    found["hook"] = _raises(FcdpError, lambda: fcdp_compile.no_sync(pair.model).__enter__())
    handle.remove()

    with fcdp_compile.no_sync(pair.model) if dist.get_rank() == 3 else nullcontext():
        found["disagree"] = _raises(PlanMismatchError, lambda: _backward(pair, plain=False))
    found["unsharded"] = _raises(ValueError, lambda: fcdp_compile.no_sync(pair.plain).__enter__())
    pair.compare_parameters()
    return found


@pytest.mark.slow
def test_misuse_is_refused_and_does_no_harm() -> None:
    for found in run(_misuse, nodes=2, ranks_per_node=2):
        assert "outside of no_sync before optimizer.step()" in found["step"]
        assert "was changed while gradients of earlier micro-batches" in found["changed"]
        assert "has a gradient hook" in found["hook"]
        assert (
            "rank 0 synchronises the gradients of this forward and rank 3 accumulates"
            in found["disagree"]
        )
        assert "not sharded" in found["unsharded"]
