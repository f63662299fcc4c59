"""Hierarchical and HO-Ring gathers give a bucket's exact bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.core.params.mesh import topology_of
from fcdp_compile.devices import Cpu
from fcdp_compile.plan import Kind
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.strategy.formats import Format
from tests.device.choice import seeded
from tests.distributed.parity import Sharded, Trial, check_equal, history
from tests.distributed.ranks import run

pytestmark = [pytest.mark.distributed, pytest.mark.rare]

SLOT = 300  # more than one block of quantised values


def _gather(mesh: DeviceMesh, numbering: str) -> dict[str, int]:
    """Gather a slot in every way; returns the counted bytes."""
    if numbering != "forwards":
        ranks = {"backwards": mesh.mesh.flip(0, 1), "across": torch.arange(6).view(2, 3).T}
        mesh = DeviceMesh("cpu", ranks[numbering], mesh_dim_names=mesh.mesh_dim_names)
    topology = topology_of(mesh)
    counters = Counters()
    lanes = Lanes.shared(topology, Cpu(), is_blocking=True)
    collectives = Collectives(topology, counters, lanes)
    chunk = topology.place * topology.nodes + topology.node
    for dtype, codec in ((torch.float32, None), (torch.bfloat16, Codec(Format.INT8, [SLOT]))):
        slots = [torch.randn(SLOT, generator=seeded(i)).to(dtype) for i in range(6)]
        home = slots[chunk]
        node = collectives.all_gather(Kind.INTER_ALL_GATHER, home, "inter", codec=codec)
        own = collectives.own_all_gather(Kind.INTRA_OWN_ALL_GATHER, home, "own", codec=codec)
        rest = collectives.rest_all_gather(Kind.INTRA_REST_ALL_GATHER, node, own, "rest")
        whole = collectives.all_gather(Kind.INTRA_ALL_GATHER, node, "intra").wait()
        expected = torch.cat([_crossed(s, codec) for s in slots])
        for found in (whole, rest.wait()):
            assert torch.equal(found, expected)
    empty = torch.empty(0)
    own = collectives.own_all_gather(Kind.INTRA_OWN_ALL_GATHER, empty, "own")
    rest = collectives.rest_all_gather(Kind.INTRA_REST_ALL_GATHER, empty, own, "rest")
    assert rest.wait().numel() == 0
    return dict(counters.sent)


def _crossed(slot: Tensor, codec: Codec | None) -> Tensor:
    return slot if codec is None else codec.decode(codec.encode(slot[None]), slot.dtype)[0]


@pytest.mark.parametrize("numbering", ["forwards", "backwards", "across"])
def test_three_nodes_of_two(numbering: str) -> None:
    """The node in the middle has its own slots between those of others."""
    encoded = 300 + 2 * 4  # int8 values, and a scale in fp32 for each of two blocks
    each, whole = SLOT * 4, SLOT * 4 + SLOT * 2
    found = run(_gather, numbering, nodes=3, ranks_per_node=2)
    for sent in found:
        assert sent["inter_all_gather"] == 2 * (each + encoded)
        assert sent["intra_all_gather"] == 3 * whole
        assert sent["intra_own_all_gather"] == whole
        assert sent["intra_rest_all_gather"] == 2 * whole


ALGORITHMS = [
    ["zero3", "zero3+ho_ring"],
    ["fcdp", "fcdp+ho_ring"],
    ["zero3+w8", "zero3+w8+ho_ring"],
]


def _compare(mesh: DeviceMesh) -> None:
    for strategies in ALGORITHMS:
        first, *others = (
            history(Sharded(mesh, Trial(case="odd", strategy=strategy)), 3)
            for strategy in strategies
        )
        for other, strategy in zip(others, strategies[1:], strict=True):
            check_equal(f"{strategies[0]} and {strategy}", other, first)


def _refuse(mesh: DeviceMesh) -> None:
    tangled = DeviceMesh("cpu", [[0, 2], [3, 1]], mesh_dim_names=mesh.mesh_dim_names)
    with pytest.raises(
        ValueError, match=r"\[\[0, 2\], \[3, 1\]\] gives two ranks the same position"
    ):
        topology_of(tangled)


def test_a_mesh_in_no_order() -> None:
    run(_refuse, nodes=2, ranks_per_node=2)


def test_two_nodes_of_two() -> None:
    run(_compare, nodes=2, ranks_per_node=2)


def _ring_over_a_part(world: DeviceMesh) -> list[bool]:
    """Train on two of three ranks; returns for each new group whether it could be split off the world."""
    mesh = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("inter", "intra"))
    if dist.get_rank() == 2:  # takes no part
        return []
    everyone: Any = dist.group.WORLD
    # As init_process_group's device_id does on GPUs; Gloo ignores it.
    everyone.bound_device_id = torch.device("cuda", 0)
    bound = []

    def note(*args: Any, **more: Any) -> Any:
        bound.append(everyone.bound_device_id is not None)
        return new_group(*args, **more)

    new_group = dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", note)
        mine = Sharded(mesh, Trial(case="odd", strategy="zero3", steps=1))
        loss = mine.loss(mine.batches(0)[mine.rank])
    loss.backward()
    torch.testing.assert_close(loss, mine.case.loss(mine.plain, mine.batches(0)[mine.rank]))
    assert everyone.bound_device_id is not None, "it is the user's"
    everyone.bound_device_id = None
    return bound


def test_a_part_of_the_world_makes_its_groups_alone() -> None:
    first, second, third = run(_ring_over_a_part, nodes=3, ranks_per_node=1)
    assert first == second
    assert len(first) >= 3
    assert not any(first)
    assert third == []
