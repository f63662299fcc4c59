"""The results of `fcdp probe` from times, its refusals, and a whole run in a single process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commands import refusal
from fcdp_compile.cli import main
from fcdp_compile.cluster.link_fit import Timed
from fcdp_compile.cluster.profile import Measured, find_profile
from fcdp_compile.cluster.requests import ProbeRequest
from fcdp_compile.devices import Cpu, Cuda
from fcdp_compile.plan.cost import MACHINES, Link
from fcdp_compile.tools.probe.measure import Findings, profile_of, sizes_up_to
from fcdp_compile.tools.probe.timings import Arithmetic, ranks_on_device

KIB, MIB = 2**10, 2**20
BUS = Link(latency_s=1e-5, bytes_per_s=12e9)

REQUEST = ProbeRequest(
    output=None, nodes=None, max_bytes=MIB, seconds=1.0, name=None, inter_bytes_per_s=None
)


def times_of(link: Link) -> list[Timed]:
    return [Timed(size, link.time_s(size)) for size in sizes_up_to(64 * MIB)]


FOUND = Findings(
    device_type="cuda",
    device_name="NVIDIA A40",
    backend="nccl",
    nodes=2,
    ranks_per_node=8,
    ranks_on_machine=8,
    device_memory_bytes=48 * 2**30,
    host_memory_bytes=2**40,
    shares_memory=False,
    inter=times_of(Link(latency_s=5e-5, bytes_per_s=1e9)),
    intra=times_of(Link(latency_s=2e-5, bytes_per_s=20e9)),
    h2d=times_of(BUS),
    d2h=times_of(dataclasses.replace(BUS, bytes_per_s=10e9)),
    copy=Timed(2 * 10**9, 0.004),
    matmul=Arithmetic(flops=10**12, seconds=0.01),
    load_alone_s=BUS.time_s(64 * MIB),
    gather_slowdown=1.0,
)


def test_sizes_grow_by_four_up_to_the_largest() -> None:
    assert sizes_up_to(256 * KIB) == [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB]
    assert sizes_up_to(100 * KIB) == [4 * KIB, 16 * KIB, 64 * KIB, 100 * KIB]
    assert sizes_up_to(4 * KIB) == sizes_up_to(1) == [4 * KIB]
    assert len(sizes_up_to(256 * MIB)) == 9


def test_a_profile_has_the_links_that_times_are_of() -> None:
    profile = profile_of(FOUND, REQUEST)
    assert profile.name == "2x8-nvidia-a40"
    assert profile_of(FOUND, dataclasses.replace(REQUEST, name="mine")).name == "mine"
    machine = profile.machine
    assert machine.inter.bytes_per_s == pytest.approx(1e9)
    assert machine.inter.latency_s == pytest.approx(5e-5)
    assert machine.intra.bytes_per_s == pytest.approx(20e9)
    assert machine.h2d.bytes_per_s == pytest.approx(12e9)
    assert machine.d2h.bytes_per_s == pytest.approx(10e9)
    assert machine.flops_per_s == pytest.approx(1e14)
    assert machine.memory_bytes_per_s == pytest.approx(5e11)
    assert (profile.nodes, profile.ranks_per_node, profile.ranks_per_host_link) == (2, 8, 1)
    assert not profile.intra_over_host_link
    assert [s.seconds for s in profile.samples if s.of is Measured.H2D] == [
        t.seconds for t in FOUND.h2d
    ]
    (product,) = (s for s in profile.samples if s.of is Measured.MATMUL)
    assert (product.bytes, product.flops, product.seconds) == (0, 10**12, 0.01)


@pytest.mark.parametrize(
    ("ratio", "ranks"), [(0.9, 1), (1.3, 1), (1.6, 2), (2.1, 2), (3.7, 4), (6.0, 8), (9.0, 8)]
)
def test_ranks_at_one_link_are_seen_by_one_that_loads_alone(ratio: float, ranks: int) -> None:
    """The profile has the whole link's bandwidth; each rank's share of it is the rank's measurement."""
    alone_s = FOUND.h2d[-1].seconds / ratio
    profile = profile_of(dataclasses.replace(FOUND, load_alone_s=alone_s), REQUEST)
    assert profile.ranks_per_host_link == ranks
    assert profile.machine.h2d.bytes_per_s == pytest.approx(ranks * 12e9)
    assert profile.machine.d2h.bytes_per_s == pytest.approx(ranks * 10e9)
    assert profile.machine.h2d.latency_s == pytest.approx(1e-5)
    assert profile.rank_machine.h2d.bytes_per_s == pytest.approx(12e9)


@pytest.mark.parametrize(("slowdown", "shares"), [(None, False), (1.2, False), (1.3, True)])
def test_a_gather_that_loads_slow_down_shares_their_link(
    slowdown: float | None, shares: bool
) -> None:
    found = dataclasses.replace(FOUND, gather_slowdown=slowdown)
    assert profile_of(found, REQUEST).intra_over_host_link == shares


def test_what_was_not_measured_is_said_to_be_stated_or_assumed() -> None:
    found = dataclasses.replace(FOUND, ranks_per_node=1, inter=[], intra=[], load_alone_s=None)
    profile = profile_of(found, dataclasses.replace(REQUEST, inter_bytes_per_s=1.25e9))
    known = MACHINES["cuda"]
    assert profile.machine.inter == Link(latency_s=known.inter.latency_s, bytes_per_s=1.25e9)
    assert profile.machine.intra == known.intra
    assert "between nodes as stated, with an assumed latency of 50 us" in profile.source
    assert "the speed between a node's ranks is assumed" in profile.source
    assert {s.of for s in profile.samples}.isdisjoint(
        {Measured.INTER_ALL_GATHER, Measured.INTRA_ALL_GATHER}
    )
    assert "stated" not in profile_of(FOUND, REQUEST).source


def test_nodes_on_one_machine_and_cpus_are_told() -> None:
    found = dataclasses.replace(FOUND, ranks_on_machine=16, device_type="cpu")
    source = profile_of(found, REQUEST).source
    assert "nodes are parts of one machine" in source
    assert "a CPU has no pinned memory" in source
    assert "one machine" not in profile_of(FOUND, REQUEST).source
    spread = dataclasses.replace(FOUND, ranks_on_machine=4)
    assert "a node is several machines" in profile_of(spread, REQUEST).source
    assert "several machines" not in profile_of(FOUND, REQUEST).source


@pytest.mark.parametrize(("others", "expected"), [(("b", "c", "d"), 1), (("a", "b", "a"), 3)])
def test_a_gpu_is_shared_by_those_that_see_the_same(
    monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...], expected: int
) -> None:
    """Each rank may see only its own GPU: it then counts one GPU, even if other ranks share that GPU."""
    collectives: Any = SimpleNamespace(exchange_texts=lambda mine: [mine, *others])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a")
    )
    assert ranks_on_device(collectives, Cuda(torch.device("cuda", 0))) == expected
    assert ranks_on_device(collectives, Cpu()) == 1


def test_a_machine_that_does_not_say_what_memory_it_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fcdp_compile.tools.probe.measure.total_bytes", lambda: None)
    told = refusal(capsys, "probe", *QUICK, "--inter", "10G")
    assert "gives this machine's memory, which a profile needs" in told


# The command.

QUICK = ("--max-size", "64KiB", "--seconds", "0.3")


def test_a_single_process_with_a_stated_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("an older one")
    arguments = ["probe", *QUICK, "--inter", "10G", "--output", str(path), "--name", "one"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("one: 1 x 1 ranks, ")
    assert "Is the host faster than your network? " in out
    assert out.endswith(f"The profile is in {path}.\n")
    profile = find_profile(str(path))
    assert (profile.nodes, profile.ranks_per_node) == (1, 1)
    assert profile.machine.inter.bytes_per_s == 1.25e9
    sizes = [s.bytes for s in profile.samples if s.of is Measured.H2D]
    assert sizes == [4 * KIB, 16 * KIB, 64 * KIB][: len(sizes)]
    assert len(sizes) >= 2
    assert list(tmp_path.iterdir()) == [path]


def test_json_is_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", *QUICK, "--inter", "10G", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "fcdp.cluster/1"


def test_a_network_that_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, "probe", *QUICK)
    assert "cannot be measured on one node; start fcdp probe on several" in text
    assert "--inter 10G" in text


def test_several_nodes_need_several_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nodes=2 needs several processes" in refusal(capsys, "probe", *QUICK, "--nodes", "2")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--inter", "10"), "argument --inter: must be a bandwidth such as 10G"),
        (("--inter", "0G"), "argument --inter: must be above 0"),
        (("--max-size", "64"), "argument --max-size: must be a number with one of the units"),
        (("--max-size", "1KiB"), "argument --max-size: must be from 16KiB to less than 1TiB"),
        (("--max-size", "2TiB"), "argument --max-size: must be from 16KiB to less than 1TiB"),
        (("--seconds", "0"), "argument --seconds: must be above 0 and at most 3600"),
        (("--seconds", "nan"), "argument --seconds: must be above 0"),
        (("--seconds", "long"), "argument --seconds: could not convert"),
        (("--nodes", "0"), "argument --nodes: must be a number of nodes from 1"),
        (("--nodes", "two"), "argument --nodes: must be a number of nodes from 1"),
        (("--name", ""), "argument --name: must be a printable name"),
        (("--name", "a\nb"), "argument --name: must be a printable name"),
        (("--output", ""), "argument --output: is empty"),
        (("--format", "xml"), "invalid choice: 'xml'"),
        (("--out", "x"), "unrecognized arguments: --out x"),
    ],
)
def test_bad_usage(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(capsys, "probe", *QUICK, *arguments)


def test_bad_usage_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    for command, lines in (("probe", 0), ("dump", 1)):
        with pytest.raises(SystemExit) as end:
            main([command, "--nonsense"])
        assert end.value.code == 2
        assert capsys.readouterr().err.count("\n") == lines


def test_a_file_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, folder = tmp_path / "missing" / "x.json", tmp_path
    assert "No such file or directory" in refusal(
        capsys, "probe", *QUICK, "--inter", "10G", "--output", str(missing)
    )
    assert "is a folder" in refusal(
        capsys, "probe", *QUICK, "--inter", "10G", "--output", str(folder)
    )
