"""The simulated device does what a card does, so that faults of order show in numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.ranks import RankError, run

pytestmark = pytest.mark.distributed

SIZE = 1024


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCDP_SIM_DELAY_US", "3000")


def _on_another_stream(is_ordered: bool) -> float:
    """Fill memory on one stream, and read it on another one."""
    here, other = torch.accelerator.current_stream(), torch.Stream(device="sim")
    filled = torch.empty(SIZE).fill_(1.0)
    if is_ordered:
        other.wait_stream(here)
    with other:
        total = filled.sum()
    other.synchronize()
    return total.item()


def _freed(is_held: bool) -> float:
    """Free memory that another stream is to read."""
    other = torch.Stream(device="sim")
    filled = torch.ones(SIZE)
    torch.accelerator.synchronize()
    with other:
        torch.empty(1).fill_(0.0)  # the other stream is late
        total = filled.sum()
    if is_held:
        other.synchronize()
    del filled
    torch.accelerator.current_stream().synchronize()
    other.synchronize()
    return total.item()


def _alone(mesh: object) -> dict[str, Any]:
    from tests.device.build import extension

    sim = extension()
    found: dict[str, Any] = {
        "ordered": [_on_another_stream(is_ordered=True) for _ in range(4)],
        "unordered": [_on_another_stream(is_ordered=False) for _ in range(4)],
        "held": [_freed(is_held=True) for _ in range(4)],
        "freed": [_freed(is_held=False) for _ in range(4)],
    }
    before = sim.counts()["pageable_copies"]
    there = torch.ones(SIZE)
    pinned = torch.zeros(SIZE, device="cpu", pin_memory=True)
    pinned.copy_(there, non_blocking=True)
    found["pinned"] = sim.counts()["pageable_copies"] - before
    torch.accelerator.synchronize()
    found["copied"] = pinned.sum().item()
    pageable = torch.zeros(SIZE, device="cpu").copy_(there, non_blocking=True)
    found["pageable"] = sim.counts()["pageable_copies"] - before, pageable.sum().item()
    sim.reset_peak()
    used = sim.memory()["used"]
    block = torch.empty(2**20)
    del block
    after = sim.memory()
    found["memory"] = after["used"] - used, after["peak"] - used
    torch.manual_seed(3)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    found["random"] = torch.equal(drawn, torch.rand(4))
    with pytest.raises(RuntimeError, match="out of range"):
        torch.nn.functional.embedding(torch.tensor([5]), torch.ones(2, 2)).sum().item()
    return found


@pytest.mark.slow
def test_streams_memory_and_copies() -> None:
    found = run(_alone, nodes=1, ranks_per_node=1)[0]
    assert found["ordered"] == found["held"] == [SIZE] * 4
    assert any(value != SIZE for value in found["unordered"]), "a missing wait shows"
    assert any(math.isnan(value) for value in found["freed"]), "freed memory is overwritten"
    assert (found["pinned"], found["copied"]) == (0, SIZE)
    assert found["pageable"] == (1, SIZE)
    assert found["memory"] == (0, 2**22)
    assert found["random"]


def _together(mesh: DeviceMesh) -> dict[str, Any]:
    from tests.device.build import extension

    rank, size = dist.get_rank(), dist.get_world_size()
    one = torch.full((3,), float(rank))
    all_of_them, mean, part = torch.empty(3 * size), one.clone(), torch.empty(3)
    dist.all_gather_into_tensor(all_of_them, one)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(part, torch.ones(3 * size), op=dist.ReduceOp.SUM)
    narrow = one.to(torch.float8_e4m3fn)
    all_narrow = torch.empty(3 * size, dtype=torch.float8_e4m3fn)
    dist.all_gather_into_tensor(all_narrow, narrow)
    work = dist.all_reduce(one, async_op=True)
    work.wait()
    return {
        "gathered": all_of_them.tolist(),
        "narrow": all_narrow.float().tolist(),
        "mean": mean.tolist(),
        "part": part.tolist(),
        "sum": one.tolist(),
        "issued": extension().issued()[-5:],
    }


@pytest.mark.slow
def test_collectives_of_several_ranks() -> None:
    ranks = run(_together, nodes=2, ranks_per_node=2)
    for found in ranks:
        assert found["narrow"] == found["gathered"]
        assert found["gathered"] == [0.0] * 3 + [1.0] * 3 + [2.0] * 3 + [3.0] * 3
        assert found["mean"] == [1.5] * 3
        assert found["part"] == [4.0] * 3
        assert found["sum"] == [6.0] * 3
        assert found["issued"] == ranks[0]["issued"], "all ranks issue in one order"


def _disordered(mesh: DeviceMesh, is_turned: bool) -> None:
    groups = [mesh.get_group("inter"), mesh.get_group("intra"), dist.group.WORLD]
    values = [torch.ones(3) for _ in groups]
    works: list[Any] = []
    turned = dist.get_rank() == 3 and is_turned
    for group, value in list(zip(groups, values, strict=True))[:: -1 if turned else 1]:
        # On streams of their own: on one stream they would wait for each other for ever.
        works.append(dist.all_reduce(value, group=group, async_op=True))
    for work in works:
        work.wait()
    assert [value.sum().item() for value in values] == [6.0, 6.0, 12.0]


@pytest.mark.slow
def test_ranks_that_issue_in_different_orders_are_noticed() -> None:
    run(_disordered, False, nodes=2, ranks_per_node=2)
    with pytest.raises(RankError, match=r"collective \d+ of ranks \d and 3: "):
        run(_disordered, True, nodes=2, ranks_per_node=2)


def _failing(mesh: DeviceMesh) -> str:
    from tests.device.build import extension

    one = torch.ones(3)
    extension().fail_after(0)
    dist.all_reduce(one)
    with pytest.raises(RuntimeError, match="told to fail") as caught:
        one.sum().item()
    return str(caught.value)


@pytest.mark.slow
def test_a_collective_may_fail_on_request() -> None:
    for text in run(_failing, nodes=2, ranks_per_node=1):
        assert "a kernel of the simulated device failed" in text
