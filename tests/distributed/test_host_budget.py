"""Too little host memory costs bytes between nodes, but changes no bit of the result."""

from __future__ import annotations

import logging
import math
import mmap
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.cluster.free_memory import HostBudget, Limit
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.errors import PlanMismatchError, StaleParameterError
from fcdp_compile.plan import Tier
from fcdp_compile.plan.json import read_plan
from fcdp_compile.runtime.cache import host_budget
from tests.distributed.jobs import message_of
from tests.distributed.models import CASES, batch
from tests.distributed.parity import adamw, check_equal, fresh
from tests.distributed.ranks import run

pytestmark = [pytest.mark.distributed, pytest.mark.rare]

_HALF = {"odd": 2 * 300, "odd-lora": 2 * 750}
"""Bytes per node that hold about half of the buckets, if every parameter has a bucket of its own."""


def _model(case: str, mesh: DeviceMesh, **options: Any) -> tuple[Any, nn.Module]:
    """A model, compiled and sharded, with a bucket for every parameter."""
    fresh()
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    model = fcdp_compile.shard(CASES[case].model(), mesh)
    options = {"bucket_mb": 1e-7, **options}
    return torch.compile(model, backend="fcdp", options=options), model


def _history(mesh: DeviceMesh, case: str, node_bytes: int | None) -> tuple[dict[str, Tensor], int]:
    """All results of a run with accumulation, evaluation, freezing and unfreezing, and its host bytes."""
    net, model = _model(case, mesh, host_memory=node_bytes)
    loss_of, optimizer = CASES[case].loss, adamw(model)
    found: dict[str, Tensor] = {}
    trained = [p for p in model.parameters() if p.requires_grad]
    for step in range(3):
        trained[1].requires_grad_(step != 1)
        for micro in range(1 + step % 2):
            ids = batch(CASES[case], step=10 * step + micro, rank=dist.get_rank())
            loss = loss_of(net, ids)
            loss.backward()
            found[f"loss {step}.{micro}"] = loss.detach()
        optimizer.step()
        found |= {f"{n} after step {step}": _local(p) for n, p in model.named_parameters()}
        optimizer.zero_grad()
        if step == 0:  # a write past the version counters, to frozen parameters, too
            with torch.no_grad():
                found["evaluation"] = loss_of(net, ids)
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
    return found, sum(c.host_bytes for c in state_of(model).buckets.caches())


def _local(parameter: Any) -> Tensor:
    """This rank's shard of a parameter, which shows Adam's state and so every gradient."""
    return parameter.to_local().detach().clone()  # type: ignore[no-any-return]


def _compare(mesh: DeviceMesh, case: str) -> list[int]:
    expected, most = _history(mesh, case, None)
    host_bytes = [most]
    for node_bytes in (_HALF[case], 0):
        found, held = _history(mesh, case, node_bytes)
        check_equal(f"{case} with {node_bytes} bytes a node", found, expected)
        host_bytes.append(held)
    return host_bytes


@pytest.mark.parametrize(("case", "ranks_per_node"), [("odd", 1), ("odd-lora", 2)])
def test_results_are_the_same_bit_by_bit(case: str, ranks_per_node: int) -> None:
    for most, some, none in run(_compare, case, nodes=2, ranks_per_node=ranks_per_node):
        assert none == 0
        share = _HALF[case] // ranks_per_node
        assert 0 < some <= share < most, "control: the budget was short"


def _with_different_limits(mesh: DeviceMesh) -> tuple[list[Any], list[str]]:
    """Rank 2 finds the least memory; each graph of the model takes its part."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fcdp_compile").addHandler(handler)
    rank = dist.get_rank()
    mine = HostBudget(bytes=300, limit=Limit.CGROUP) if rank == 2 else HostBudget(
        bytes=10**9 + rank, limit=Limit.AVAILABLE
    )  # fmt: skip
    host_budget.detect = lambda **ranks: mine
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    net, _ = _model("broken", mesh, dump=folders[0])
    for step in range(2):
        ids = batch(CASES["broken"], step=step, rank=rank)
        CASES["broken"].loss(net, ids).backward()
    dist.barrier()
    plans = [read_plan(p) for p in sorted(Path(folders[0]).glob("*.plan.json"))]
    return [pair for p in plans for pair in p.placed], messages


def test_ranks_agree_on_the_least_and_one_warns() -> None:
    results = run(_with_different_limits, nodes=2, ranks_per_node=2)
    placed = {b.id: (b, at) for b, at in results[0][0]}
    cached = [b for b, at in placed.values() if at.tier is Tier.HOST]
    left_out = [at for _, at in placed.values() if "does not fit" in at.why]
    assert all(at.tier is Tier.NONE for at in left_out)
    assert 0 < sum(b.node_bytes for b in cached) <= 300
    assert left_out
    assert all(Limit.CGROUP.value in at.why for at in left_out)
    assert [len(messages) for _, messages in results] == [1, 0, 0, 0]
    (message,) = results[0][1]
    assert "do not fit in host memory and are gathered between nodes at every use" in message
    assert Limit.CGROUP.value in message


def _misuse(mesh: DeviceMesh) -> tuple[str, str]:
    ids = batch(CASES["odd"], step=0, rank=dist.get_rank())
    loss_of = CASES["odd"].loss
    net, model = _model("odd", mesh, host_memory=_HALF["odd"])
    loss = loss_of(net, ids)
    if dist.get_rank() == 1:
        model.second.weight.data.add_(1)
    stale = message_of(StaleParameterError, loss.backward)
    net, _ = _model("odd", mesh, host_memory="0B" if dist.get_rank() == 3 else None)
    different = message_of(PlanMismatchError, lambda: loss_of(net, ids))
    dist.barrier()
    return stale, different


def test_misuse_is_found_on_every_rank() -> None:
    """A change between a forward and a backward that gathers again, and a different option on one rank."""
    for stale, different in run(_misuse, nodes=2, ranks_per_node=2):
        assert "changed between the forward and its backward" in stale
        assert different.startswith("ranks 0 and 3 compiled different plans")
        assert "bucket 0 tier" in different
        assert "options={'host_memory': …}" in different


def _wide(mesh: DeviceMesh) -> tuple[int, int, int]:
    fresh()
    model = nn.Sequential(*[nn.Linear(203, 203) for _ in range(8)])
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    model = fcdp_compile.shard(model, mesh)
    net = torch.compile(model, backend="fcdp", options={"bucket_mb": 0.2})
    for _ in range(2):
        net(torch.rand(3, 203)).sum().backward()
    state = state_of(model)
    return parameter_bytes, state.pool.slab_bytes, sum(c.host_bytes for c in state.buckets.caches())


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_the_slabs_of_a_node_take_little_more_than_its_parameters(ranks_per_node: int) -> None:
    results = run(_wide, nodes=2, ranks_per_node=ranks_per_node)
    for node in range(2):
        mine = results[node * ranks_per_node : (node + 1) * ranks_per_node]
        parameter_bytes = mine[0][0]
        slab_bytes = sum(slabs for _, slabs, _ in mine)
        assert parameter_bytes <= sum(held for _, _, held in mine)
        assert slab_bytes <= 1.05 * parameter_bytes
        assert all(math.ceil(held / mmap.PAGESIZE) * mmap.PAGESIZE <= s for _, s, held in mine)
