"""One budget for all ranks, one option for all graphs, one warning."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fcdp_compile
from builders_plan import make_bucket
from fcdp_compile.cluster.free_memory import UNLIMITED, HostBudget, Limit
from fcdp_compile.runtime.cache import host_budget
from fcdp_compile.runtime.cache.host_budget import HostMemory

MIB = 2**20
GIB = 2**30


@dataclass(eq=False)
class _Topology:
    nodes: int
    ranks_per_node: int
    node: int
    place: int


def make(*, nodes: int = 2, ranks_per_node: int = 4, place: int = 0) -> HostMemory:
    topology: Any = _Topology(nodes, ranks_per_node, 0, place)
    return HostMemory(topology)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The memory that this rank finds, and the number of ranks that share it."""
    found = SimpleNamespace(bytes=100, limit=Limit.AVAILABLE, lockable=None, sharing=())

    def detect(*, ranks_on_machine: int, ranks_in_group: int) -> HostBudget:
        found.sharing = (ranks_on_machine, ranks_in_group)
        return HostBudget(bytes=found.bytes, limit=found.limit)

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(host_budget, "detect", detect)
    monkeypatch.setattr(host_budget, "lockable_bytes", lambda: found.lockable)
    return found


def agree(
    memory: HostMemory, *others: list[int], pool_bytes: int = 0, pinned: bool = False
) -> None:
    """Agree with ranks that found other numbers; registering works up to `pool_bytes`."""
    collectives: Any = SimpleNamespace(agree=lambda words, what: [words, *others])
    pool: Any = SimpleNamespace(can_register=lambda size: size <= pool_bytes, slab_bytes=0)
    memory.agree(collectives, pool, is_pinned=pinned)


def budget(memory: HostMemory) -> tuple[int, Limit]:
    return memory.budget.bytes, memory.budget.limit


def test_without_an_agreement_there_is_no_limit() -> None:
    assert budget(make()) == (UNLIMITED, Limit.NOTHING)


def test_the_poorest_rank_decides(machine: SimpleNamespace) -> None:
    memory = make()
    position = list(Limit).index(Limit.CGROUP)
    agree(memory, [300, 0, UNLIMITED, 0], [70, position, UNLIMITED, 0], [80, 0, UNLIMITED, 0])
    assert budget(memory) == (70, Limit.CGROUP)


@pytest.mark.parametrize(("local", "sharing"), [(None, (4, 4)), ("8", (8, 8)), ("1", (4, 1))])
def test_who_shares_the_memory(
    machine: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    local: str | None,
    sharing: tuple[int, int],
) -> None:
    """Nodes may be parts of a machine, and a rank may have a container of its own."""
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    agree(make())
    assert machine.sharing == sharing


@pytest.mark.parametrize(
    ("lockable", "works_up_to", "expected"),
    [
        (8 * MIB, 0, (8 * MIB, Limit.LOCKED)),
        (8 * MIB, UNLIMITED, (GIB, Limit.AVAILABLE)),  # the driver does not count memory as locked
        (512 * MIB, UNLIMITED, (512 * MIB, Limit.LOCKED)),  # too much to try
        (None, 0, (GIB, Limit.AVAILABLE)),
    ],
)
def test_locked_memory_counts_where_it_is_enforced(
    machine: SimpleNamespace, lockable: int | None, works_up_to: int, expected: tuple[int, Limit]
) -> None:
    machine.bytes, machine.lockable = GIB, lockable
    memory = make()
    agree(memory, pool_bytes=works_up_to, pinned=True)
    assert budget(memory) == expected
    unpinned = make()
    agree(unpinned, pool_bytes=works_up_to)
    assert budget(unpinned) == (GIB, Limit.AVAILABLE)


def test_models_on_one_mesh_share_what_is_free(machine: SimpleNamespace) -> None:
    """Whether the other model planned or used its memory before or after this model looked."""
    machine.bytes = 1000
    topology: Any = _Topology(2, 1, 0, 0)
    first, second = HostMemory(topology), HostMemory(topology)
    elsewhere = make()
    agree(first)
    agree(elsewhere)
    first.planned_bytes = 600
    agree(second)  # nothing is in use yet
    assert budget(second) == (400, Limit.AVAILABLE)
    machine.bytes = 500
    first._pool.slab_bytes = 500  # most of the planned memory is in use
    agree(second)
    assert budget(second) == (400, Limit.AVAILABLE)
    second.planned_bytes = 300
    assert budget(first) == (700, Limit.AVAILABLE)
    assert budget(elsewhere) == (1000, Limit.AVAILABLE)
    second.end()
    agree(HostMemory(topology), [500, 0, UNLIMITED, 0])
    assert budget(first) == (700, Limit.AVAILABLE), "another rank has not noticed"
    third = HostMemory(topology)
    agree(third, [500, 0, UNLIMITED, 0b10])
    assert budget(first) == (1000, Limit.AVAILABLE)
    third.planned_bytes = 300
    first.ask(800)
    assert budget(first) == (500, Limit.OPTION), "the user's number is for both"


def test_an_option_is_shared_by_the_ranks_of_a_node(machine: SimpleNamespace) -> None:
    machine.bytes, machine.lockable = 1000, 10
    memory = make(ranks_per_node=4)
    agree(memory, pinned=True)
    assert budget(memory) == (10, Limit.LOCKED)
    memory.ask(403)
    assert budget(memory) == (100, Limit.OPTION)
    memory = make(ranks_per_node=4)
    agree(memory)
    memory.ask(100_000)
    assert budget(memory) == (1000, Limit.AVAILABLE)
    memory = make()
    memory.ask(0)
    assert budget(memory) == (0, Limit.OPTION)


def test_a_model_has_one_option() -> None:
    memory = make()
    for asked in (None, 400, None, 400):
        memory.ask(asked)
    with pytest.raises(ValueError, match=r"is 500 bytes, but an earlier graph .* with 400; give"):
        memory.ask(500)
    assert budget(memory) == (100, Limit.OPTION)


def test_so_says_the_backend() -> None:
    torch._dynamo.reset()
    model = fcdp_compile.shard(nn.Linear(3, 3))
    for options in ({"host_memory": "1MiB"}, {}, {"host_memory": MIB}):
        torch.compile(model, backend="fcdp", options=options)(torch.rand(2, 3))
        torch._dynamo.reset()
    net = torch.compile(model, backend="fcdp", options={"host_memory": "2MiB"})
    with pytest.raises(Exception, match="option 'host_memory' is 2097152 bytes, but an earlier"):
        net(torch.rand(2, 3))


CACHED = make_bucket(0, [("a", (1024, 1024))])
LEFT_OUT = make_bucket(1, [("b", (1024, 512))])
LATER = make_bucket(2, [("c", (4, 4))])


def test_one_warning_on_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    first, other = make(ranks_per_node=2), make(ranks_per_node=2, place=1)
    for memory in (first, other):
        memory.ask(3 * MIB)
        memory.warn([], [CACHED])
        assert caplog.text == ""
    for lost, wanting in (
        ([LEFT_OUT], [CACHED, LEFT_OUT]),
        ([], [CACHED, LEFT_OUT]),
        ([LATER], [LATER]),
    ):
        for memory in (first, other):
            memory.warn(lost, wanting)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "1 of 2 buckets (0.5 of 1.5 MiB a rank) do not fit in host memory and are gathered between nodes "
        "at every use: same numbers, slower; the cache may take 1.5 MiB a rank because of "
        "options={'host_memory': …}; raise it"
    )
