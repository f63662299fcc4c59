"""`fcdp probe` on several ranks: one rank prints and writes, and all ranks always end together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fcdp_compile.cluster.link_fit import Timed
from fcdp_compile.cluster.profile import ClusterProfile, Measured, find_profile, profile_to_json
from fcdp_compile.cluster.requests import ProbeOutcome, ProbeRequest
from fcdp_compile.core.params.mesh import topology_of
from fcdp_compile.devices import current_device
from fcdp_compile.tools.probe.measure import probe
from fcdp_compile.tools.probe.timings import Probing
from tests.distributed import ranks

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900.0
KIB = 2**10


def commands(world: int, *arguments: str | Path) -> list[tuple[int, str, str]]:
    """`fcdp probe` as torchrun starts it on one machine: exit code, stdout and stderr of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "fcdp_compile.cli", "probe", *map(str, arguments)]
    jobs = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        texts = [job.communicate(timeout=TIMEOUT_S) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, *text) for job, text in zip(jobs, texts, strict=True)]


@pytest.mark.slow
def test_four_ranks_on_two_nodes(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    arguments = ("--nodes", "2", "--max-size", "64KiB", "--seconds", "2", "--format", "json")
    found = commands(4, *arguments, "--output", path)
    assert [code for code, _, _ in found] == [0, 0, 0, 0], found
    assert [out for _, out, _ in found[1:]] == ["", "", ""]
    profile = find_profile(str(path))
    assert found[0][1] == profile_to_json(profile)
    assert (profile.name, profile.nodes, profile.ranks_per_node) == ("2x2-cpu", 2, 2)
    assert "nodes are parts of one machine" in profile.source
    check_samples(profile)


def check_samples(profile: ClusterProfile) -> None:
    """In a gather between two nodes of two ranks, each rank sends half of its node's bytes."""
    sizes = [4 * KIB, 16 * KIB, 64 * KIB]
    for of, ranks_counted in (
        (Measured.INTER_ALL_GATHER, 2),
        (Measured.INTRA_ALL_GATHER, 1),
        (Measured.H2D, 1),
        (Measured.D2H, 1),
    ):
        measured = [s.bytes for s in profile.samples if s.of is of]
        assert len(measured) >= 2
        assert measured == [ranks_counted * size for size in sizes[: len(measured)]]
    (copy,) = (s for s in profile.samples if s.of is Measured.COPY)
    assert copy.bytes == 2 * sizes[-1]


@pytest.mark.rare
def test_what_cannot_be_written_ends_all_ranks_at_once(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "cluster.json"
    found = commands(2, "--nodes", "2", "--output", path)
    assert [code for code, _, _ in found] == [2, 2], found
    assert found[0][2] == (
        f"fcdp: {path}: No such file or directory; give a file in --output that can be written\n"
    )
    assert [out + err for _, out, err in found[1:]] == [""]


@pytest.mark.rare
def test_one_node_without_a_stated_network_ends_all_ranks() -> None:
    found = commands(2)
    assert [code for code, _, _ in found] == [2, 2], found
    assert "the network between nodes cannot be measured on one node" in found[0][2]
    assert [out + err for _, out, err in found[1:]] == [""]


REQUEST = ProbeRequest(
    output=None, nodes=1, max_bytes=16 * KIB, seconds=0.5, name=None, inter_bytes_per_s=1e9
)


def _probe(mesh: DeviceMesh, request: ProbeRequest) -> ProbeOutcome:
    return probe(request)


@pytest.mark.cpu  # a card's matrix product would take the CPU minutes
def test_all_ranks_find_the_same() -> None:
    """Within a job that already has groups and keeps them."""
    found = ranks.run(_probe, REQUEST, nodes=1, ranks_per_node=3)
    assert [outcome.is_first for outcome in found] == [True, False, False]
    profile = found[0].profile
    assert profile is not None
    assert profile == found[1].profile == found[2].profile
    assert (profile.nodes, profile.ranks_per_node) == (1, 3)
    assert profile.machine.inter.bytes_per_s == 1e9
    sent = [s.bytes for s in profile.samples if s.of is Measured.INTRA_ALL_GATHER]
    assert sent == [4 * KIB, 16 * KIB]


def _probe_differently(mesh: DeviceMesh) -> ProbeOutcome:
    return probe(replace(REQUEST, max_bytes=REQUEST.max_bytes << 2 * dist.get_rank()))


def _probe_without_memory(mesh: DeviceMesh) -> ProbeOutcome:
    if dist.get_rank() == 1:
        Probing._filled = _no_memory  # type: ignore[method-assign]
    return probe(REQUEST)


def _no_memory(self: Probing, size: int) -> Tensor:
    raise MemoryError(f"no room for {size} bytes")


def _probe_other_nodes(mesh: DeviceMesh) -> ProbeOutcome:
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + dist.get_rank())  # machines that started 1 and 2 ranks
    return probe(replace(REQUEST, nodes=None))


@pytest.mark.parametrize(
    ("probing", "expected"),
    [
        (_probe_differently, "different --inter, --max-size or --seconds"),
        (_probe_without_memory, "rank 1: no room for 4096 bytes"),
        (_probe_other_nodes, "rank 0 makes 2 nodes of 2 ranks and rank 1 makes 1"),
    ],
)
def test_what_goes_wrong_on_one_rank_ends_all(
    probing: Callable[[DeviceMesh], ProbeOutcome], expected: str
) -> None:
    """No rank waits for a rank that measures something else, or nothing."""
    found = ranks.run(probing, nodes=1, ranks_per_node=2)
    assert all(expected in each.refusal for each in found), found
    assert [each.is_first for each in found] == [True, False]


def test_ranks_that_no_nodes_divide_are_refused_on_all() -> None:
    request = ProbeRequest(
        output=None, nodes=2, max_bytes=KIB, seconds=1.0, name=None, inter_bytes_per_s=None
    )
    found = ranks.run(_probe, request, nodes=1, ranks_per_node=3)
    assert all("world size 3 cannot be split into 2 nodes" in each.refusal for each in found)
    assert [each.is_first for each in found] == [True, False, False]


def _slowdown(mesh: DeviceMesh) -> list[float]:
    topology = topology_of(mesh)
    probing = Probing(topology, current_device(topology.device_type))
    size = 64 * KIB
    alone_s = probing.load_alone_s(size, budget_s=0.1)
    return [alone_s, probing.gather_slowdown(Timed(size, 1e-3), Timed(size, 1e-3 / 4))]


def test_gathers_beside_loads_and_loads_of_one_rank() -> None:
    """On a GPU the times tell which links are shared; here all ranks must end with equal results."""
    first, second = ranks.run(_slowdown, nodes=1, ranks_per_node=2)
    assert first == second
    assert min(first) > 0
