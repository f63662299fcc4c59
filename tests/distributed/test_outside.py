"""Parameters that no graph uses cross between nodes as often as those of a graph, with the same numbers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from tests import formulas
from tests.device.choice import seeded
from tests.distributed.ranks import run
from tests.zoo.cases import ZOO

pytestmark = pytest.mark.distributed

STEPS = 4
BETWEEN = ("inter_all_gather", "inter_reduce_scatter")
ASKED = {"whole": 1, "disabled": 6, "checkpointed": 9, "uncompiled": 12, "tied": 6}
"""Agreements of a micro-batch: one of each graph, and one of each read and reduction outside of graphs."""


class Block(nn.Module):
    """Two matrices: the first one stays frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.adapter = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x)) + self.adapter(x)


class Net(nn.Module):
    """Three blocks; the second may be left out of graphs, checkpointed, or share the first one's adapter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = Block(), Block(), Block()
        self.how = how
        if how == "tied":
            self.second.adapter.weight = self.first.adapter.weight

    def _outside(self, x: Tensor) -> Tensor:
        if self.how == "checkpointed":
            out: Tensor = checkpoint(self.second, x, use_reentrant=False)
            return out
        return self.second(x)  # type: ignore[no-any-return]  # nn.Module's call has no type

    def forward(self, x: Tensor) -> Tensor:
        outside = self._outside if self.how == "whole" else torch._dynamo.disable(self._outside)
        return self.third(outside(self.first(x))).square().mean()  # type: ignore[no-any-return]  # as above


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 12, generator=seeded(10 * step + rank))


def _poke(model: nn.Module, step: int) -> None:
    """Before the last step, write to a frozen parameter that no graph uses."""
    if step == STEPS - 1:
        second: Any = model.second
        with torch.no_grad():
            second.base.bias.mul_(0.5)


def _replicated(how: str, world: int) -> list[float]:
    model, losses = Net(how), []
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(STEPS):
        _poke(model, step)
        for micro in (100 + step, step):
            loss = torch.stack([model(_batch(micro, rank)) for rank in range(world)]).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _train(mesh: DeviceMesh, hows: list[str], strategy: str) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    found: dict[str, Any] = {}
    for how in hows:
        torch._dynamo.reset()
        warnings = _Warnings()
        logging.getLogger("fcdp_compile").addHandler(warnings)
        model = fcdp_compile.shard(Net(how), mesh, strategy=strategy)
        net = model if how == "uncompiled" else torch.compile(model, backend="fcdp")
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        sent, asked, losses, counters = [], [], [], state_of(model).counters
        with torch.inference_mode():
            net(_batch(0, rank))
        sent.append([counters.sent.get(k, 0) for k in BETWEEN])
        for step in range(STEPS):
            _poke(model, step)
            before = dict(counters.sent)
            with fcdp_compile.no_sync(model):
                net(_batch(100 + step, rank)).backward()
            loss = net(_batch(step, rank))
            loss.backward()
            sent.append([counters.sent.get(k, 0) - before.get(k, 0) for k in BETWEEN])
            asked.append(counters.sent["agree"] - before["agree"])
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
        logging.getLogger("fcdp_compile").removeHandler(warnings)
        found[how] = sent, asked, losses, warnings.texts
    return found


def _train_real(mesh: DeviceMesh, name: str) -> tuple[int, int, list[int]]:
    """Bytes of all and of the trained parameters, and those sent between nodes in each step."""
    case = ZOO[name].built()
    torch.manual_seed(0)
    model = case.model()
    trained = [p for p in model.parameters() if p.requires_grad]
    every, mine = (sum(p.nbytes for p in ps) for ps in (model.parameters(), trained))
    net = torch.compile(fcdp_compile.shard(model, mesh), backend="fcdp")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    sent, counters = [], state_of(model).counters
    for step in range(3):
        before = sum(counters.sent.get(k, 0) for k in BETWEEN)
        generator = seeded(10 * step + dist.get_rank())
        ids = torch.randint(0, case.vocabulary, (2, 16), generator=generator)
        case.loss(net, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        sent.append(sum(counters.sent.get(k, 0) for k in BETWEEN) - before)
    return every, mine, sent


@pytest.mark.rare
@pytest.mark.parametrize("name", ["t5-lora-checkpointed", "gpt2-lora-checkpointed"])
def test_breaks_of_real_models_cost_no_bytes(name: str) -> None:
    for every, trained, sent in run(_train_real, name, nodes=2, ranks_per_node=2):
        # Slots are padded to whole rows.
        assert sent[0] == pytest.approx((every + trained) / 4, rel=0.01)
        assert sent[1] == sent[2] == pytest.approx(2 * trained / 4, rel=0.01)


HOWS = ["whole", "disabled", "checkpointed", "uncompiled", "tied"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fcdp", "zero1"])
def test_bytes_are_those_of_a_graph(strategy: str) -> None:
    ranks = run(_train, HOWS, strategy, nodes=2, ranks_per_node=2)
    whole = ranks[0]["whole"][0]
    matrix, bias = 12 * 12 * 4 // 4, 12 * 4 // 4  # bytes of a rank's slot
    assert whole[0] == [6 * matrix + 3 * bias, 0], "the evaluation gathers everything once"
    assert whole[1:3] == [[0, 3 * matrix], [3 * matrix, 3 * matrix]], "adapters alone"
    for rank, found in enumerate(ranks):
        for how, (sent, asked, losses, texts) in found.items():
            about = f"{how}, rank {rank}"
            expected = torch.tensor(_replicated(how, 4))
            torch.testing.assert_close(torch.tensor(losses), expected, rtol=1e-6, atol=0, msg=about)
            # Two micro-batches, and the optimizer's step.
            assert asked == [(2 * ASKED[how] + 1) * formulas.AGREE_WORDS * 8] * STEPS, about
            if how == "whole":
                continue
            if how == "tied":  # gathered once for both uses, and reduced for each
                assert sent[2] == sent[3] == [2 * matrix, 3 * matrix], about
                continue
            assert sent[:4] == whole[:4], about
            # A graph gathers the whole bucket of what was written to; outside, a parameter is its own.
            assert sent[4] == [3 * matrix + bias, 3 * matrix], about
            told = [t for t in texts if "are used outside of its graphs" in t]
            assert len(told) == (rank == 0 and how != "uncompiled"), (about, texts)
            if told:
                assert f"waited for {2 * matrix} bytes from other nodes" in told[0]


def _evaluate_and_train(mesh: DeviceMesh, node_bytes: int) -> dict[str, tuple[int, int]]:
    """Bytes sent between nodes and within, where host memory has room for one copy of each parameter."""
    torch._dynamo.reset()
    model, rank, found = fcdp_compile.shard(Net("whole"), mesh), dist.get_rank(), {}
    state = state_of(model)
    state.host_memory.ask(node_bytes)
    net = torch.compile(model, backend="fcdp", options={"host_memory": node_bytes})

    def evaluate(name: str) -> None:
        before = dict(state.counters.sent)
        with torch.no_grad():
            model(_batch(0, rank))
        kinds = ("inter_all_gather", "intra_all_gather")
        found[name] = tuple(state.counters.sent[k] - before.get(k, 0) for k in kinds)

    state.host_memory.planned_bytes = node_bytes  # as if graphs took it all
    evaluate("no room")
    state.host_memory.planned_bytes = 0
    evaluate("first")
    model.requires_grad_(False)
    evaluate("just frozen")
    evaluate("frozen")
    for block in model.children():
        block.adapter.requires_grad_(True)
    for _ in range(2):
        net(_batch(0, rank)).backward()
    evaluate("after graphs")
    found["memory"] = (
        sum(c.host_bytes for c in state.buckets.caches()),
        state.host_memory.unplanned_bytes,
    )
    return found


@pytest.mark.cpu  # elsewhere copies are on the device
def test_a_graph_takes_the_host_memory_of_copies_of_its_parameters() -> None:
    adapters, every = 3 * 12 * 12 * 4, 3 * (2 * 12 * 12 + 12) * 4
    for found in run(_evaluate_and_train, every, nodes=2, ranks_per_node=2):
        assert found == {
            "no room": (every // 4, every // 2),
            "first": (every // 4, every // 2),
            "just frozen": (adapters // 4, every // 2),
            "frozen": (0, every // 2),
            "after graphs": (0, every // 2),  # each parameter, not its whole bucket
            "memory": (every // 2, 0),
        }


def _delete_a_block(mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Bytes of copies on the host, held and counted, before and after a block was replaced."""
    model, batch, found = fcdp_compile.shard(Net("whole"), mesh), _batch(0, 0), []
    state = state_of(model)
    for change in (lambda: None, lambda: setattr(model, "second", nn.Identity())):
        change()
        with torch.no_grad():
            model(batch)
        held_bytes = sum(c.host_bytes for c in state.buckets.caches())
        found.append((held_bytes, state.host_memory.unplanned_bytes))
        model.requires_grad_(False)  # so that adapters get other copies
    return found


def test_copies_of_deleted_parameters_are_released() -> None:
    block = (2 * 12 * 12 + 12) * 4
    for found in run(_delete_a_block, nodes=2, ranks_per_node=1):
        assert found == [(3 * block, 3 * block), (2 * block, 2 * block)]


def _other_values_between(mesh: DeviceMesh) -> list[float]:
    model = fcdp_compile.shard(Net("whole"), mesh)
    batch = _batch(0, 0)
    with torch.no_grad():
        before = model(batch).item()
        halves = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
        torch.func.functional_call(model, halves, batch)
        return [before, model(batch).item()]


def test_values_that_a_caller_puts_in_their_place_do_not_stay() -> None:
    for before, after in run(_other_values_between, nodes=2, ranks_per_node=1):
        assert before == after


class Either(nn.Module):
    """Two layers, of which a forward uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(2)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x).square().mean()  # type: ignore[no-any-return]  # as above


def _use_either(mesh: DeviceMesh) -> None:
    """The micro-batch that synchronises leaves out what the one before it used."""
    plain, model = Either(), fcdp_compile.shard(Either(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank, world = dist.get_rank(), dist.get_world_size()
    with fcdp_compile.no_sync(model):
        model(_batch(0, rank), 0).backward()
    model(_batch(1, rank), 1).backward()
    for step in range(2):
        torch.stack([plain(_batch(step, r), step) for r in range(world)]).mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)  # type: ignore[union-attr, operator]
    optimizer.step()


def test_gradients_that_waited_are_reduced_with_those_of_other_parameters() -> None:
    run(_use_either, nodes=2, ranks_per_node=1)
