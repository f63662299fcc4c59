"""Home shards, gradients and states in host memory: the same numbers, and the bytes of the formula."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.plan import Direction, Kind, Variant
from tests.distributed.beside import Beside
from tests.distributed.models import CASES
from tests.distributed.parity import values
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

_HOME = (Kind.LOAD_HOME.value, Kind.STORE_GRADS.value)


def _pair(mesh: DeviceMesh, name: str, **options: Any) -> Beside:
    return Beside(mesh, CASES[name], optimizer=torch.optim.AdamW, **options)


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _step(pair: Beside, net: Any, step: int) -> float:
    """Two micro-batches and a clipped step."""
    for i in range(2):
        with fcdp_compile.no_sync(net) if not i else nullcontext():
            loss = pair.case.loss(net, pair.data(2 * step + i))
            loss.backward()
    torch.nn.utils.clip_grad_norm_(_trained(pair.model), 0.1)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    return float(loss)


def _parity(mesh: DeviceMesh, name: str, strategy: str) -> None:
    for compiles in (True, False):
        found: list[tuple[list[float], dict[str, Tensor]]] = []
        for offloads in (False, True):
            pair = _pair(mesh, name, strategy=strategy, offload_params=offloads)
            net = pair.net if compiles else pair.model
            losses = [_step(pair, net, step) for step in range(3)]
            with torch.inference_mode():
                losses.append(float(pair.case.loss(net, pair.data(9))))
            found.append((losses, values(pair.model)))
            moved = [pair.counters.sent.get(kind, 0) for kind in _HOME]
            assert all(moved) if offloads else not any(moved), moved
        (losses, parameters), (other_losses, others) = found
        assert losses == other_losses
        for n, value in parameters.items():
            assert torch.equal(value, others[n]), n


@pytest.mark.parametrize(
    ("name", "strategy", "nodes", "ranks_per_node"),
    [
        pytest.param("odd", "fcdp", 2, 2, marks=pytest.mark.slow),
        pytest.param("odd-lora", "zero3", 2, 2, marks=pytest.mark.rare),
        pytest.param("odd-lora", "fcdp", 1, 2, marks=pytest.mark.slow),
        pytest.param("odd-lora", "fcdp", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_offloaded_parameters_change_no_number(
    name: str, strategy: str, nodes: int, ranks_per_node: int
) -> None:
    run(_parity, name, strategy, nodes=nodes, ranks_per_node=ranks_per_node)


# --- bytes ----------------------------------------------------------------------------------------------


def _bytes(mesh: DeviceMesh, strategy: str) -> tuple[int, int, dict[str, int], dict[str, int]]:
    """Slots of the parameters, of those that the backward reads, and counts of the second step and plan."""
    pair = _pair(mesh, "odd", strategy=strategy, offload_params=True)
    model = state_of(pair.model)
    sizes = [r.local().nbytes for r in model.records.values()]
    # torch's pinned allocator gives powers of two.
    home = sum(1 << (n - 1).bit_length() if n and model.device.registers else n for n in sizes)
    assert (model.host_memory.home_bytes, fcdp_compile.memory(pair.model).host_bytes) == (
        home,
        home,
    )
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, home)
    assert model.host_memory.unplanned_bytes == 2 * max(everywhere)
    counts: dict[str, int] = {}
    for step in range(2):
        before = dict(pair.counters.sent)
        pair.case.loss(pair.net, pair.data(step)).backward()
        counts = {k: pair.counters.sent.get(k, 0) - before.get(k, 0) for k in _HOME}
        for p in _trained(pair.model):
            assert p.grad is not None
            assert p.grad.to_local().device.type == "cpu"  # type: ignore[attr-defined]
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    (plan,) = model.plans.values()
    wanted = (Direction.FORWARD, plan.schedules[0].variant), (Direction.BACKWARD, Variant.COLD)
    planned = dict.fromkeys(_HOME, 0)
    for schedule in plan.schedules:
        if (schedule.direction, schedule.variant) in wanted:
            for kind, size in schedule.bytes_by_kind().items():
                if kind.value in planned:
                    planned[kind.value] += size
    slots = {b.id: sum(p.layout.slot_elements for p in b.params) * 4 for b in plan.buckets}
    assert all(b.dtype == "float32" for b in plan.buckets)
    slot_bytes = sum(r.spec.slot_bytes for r in model.records.values())
    (backward,) = (
        s for s in plan.schedules if (s.direction, s.variant) == (Direction.BACKWARD, Variant.COLD)
    )
    sent = [s.bucket for s in backward.steps if s.kind is Kind.INTER_ALL_GATHER]
    again = sum(slots[i] for i in sent if i is not None)
    return slot_bytes, again, counts, planned


@pytest.mark.parametrize("strategy", ["fcdp", pytest.param("zero3", marks=pytest.mark.slow)])
def test_counters_plan_and_formula_agree(strategy: str) -> None:
    """Home shards are loaded for each gather between nodes, and gradients stored once."""
    for slots, again, counts, planned in run(_bytes, strategy, nodes=2, ranks_per_node=2):
        assert (again == 0) == (strategy == "fcdp"), "the cache serves the backward"
        assert counts == planned == {"load_home": slots + again, "store_grads": slots}


# --- everything else that reads and writes them ---------------------------------------------------------


def _other_uses(mesh: DeviceMesh, folder: str) -> None:
    pair = _pair(mesh, "odd", offload_params=True)
    pair.train(2)
    pair.compare_parameters()
    with torch.no_grad():
        assert pair.losses(7)[0] == pytest.approx(pair.losses(7)[1], rel=1e-5)
    fcdp_compile.save(folder, pair.model, optimizer=pair.optimizer)
    kept = values(pair.model)
    pair.train(1)
    fcdp_compile.load(folder, pair.model, optimizer=pair.optimizer)
    for name, value in values(pair.model).items():
        assert torch.equal(value, kept[name]), name
    pair = _pair(mesh, "odd", offload_params=True)
    with fcdp_compile.gathered(pair.model, writeback=True), torch.no_grad():
        for p in pair.model.parameters():
            p.mul_(0.5)
    with torch.no_grad():
        for p in pair.plain.parameters():
            p.mul_(0.5)
    pair.train(2)
    pair.compare_parameters()
    pair.model.load_state_dict(pair.model.state_dict())
    first = next(iter(pair.model.parameters()))
    first.requires_grad_(False)
    next(iter(pair.plain.parameters())).requires_grad_(False)
    pair.train(2)
    pair.compare_parameters()
    first.requires_grad_(True)
    next(iter(pair.plain.parameters())).requires_grad_(True)
    pair.train(2)
    pair.compare_parameters()
    pair.model.to(torch.get_default_device())
    with pytest.raises(ArgumentError, match="sharded with offload_params=True"):
        fcdp_compile.offload(pair.optimizer)


@pytest.mark.slow
def test_everything_else_works_on_offloaded_parameters(tmp_path: Path) -> None:
    run(_other_uses, str(tmp_path), nodes=2, ranks_per_node=2)


def _unfrozen(mesh: DeviceMesh) -> None:
    """A base whose shards the cache released is trained later: it stays on the device."""
    pair = _pair(mesh, "odd-lora", offload_params=True)
    pair.train(2)
    for model in pair.both:
        model.requires_grad_(True)
    pair.use(torch.optim.SGD)  # type: ignore[arg-type]
    pair.train(2)
    pair.compare_parameters()


@pytest.mark.slow
def test_a_base_can_be_unfrozen() -> None:
    run(_unfrozen, nodes=2, ranks_per_node=2)


def _refusals(mesh: DeviceMesh) -> None:
    def refused(match: str, **options: Any) -> None:
        with pytest.raises(ArgumentError, match=match):
            fcdp_compile.shard(nn.Linear(8, 8), mesh, **options)

    refused("keeps all parameters on every rank", strategy="ddp", offload_params=True)
    refused("every rank has all parameters", strategy="mics", offload_params=True)
    refused("must be True, False or 'auto', not 'yes'", offload_params="yes")
    refused("offloads=True", offload_params=dist.get_rank() == 1)
    model = fcdp_compile.shard(nn.Linear(8, 8), mesh, offload_params="auto")
    assert not state_of(model).host_memory.home_bytes, "a CPU has no memory to fill"


def test_what_cannot_work_is_refused() -> None:
    run(_refusals, nodes=2, ranks_per_node=1)
    with pytest.raises(ArgumentError, match="every rank has all parameters"):
        fcdp_compile.shard(nn.Linear(8, 8), offload_params=True)
