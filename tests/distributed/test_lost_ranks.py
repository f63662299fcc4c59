"""Ranks that stop, die or come late: every other rank raises in time and names the rank and the step.

All cases run at the same time, as their ranks mostly wait.  Limits are generous, so that they hold on a busy
machine: the faults that the tests look for would take ten minutes or half an hour.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fcdp_compile
from fcdp_compile.core.params.mesh import new_control_group, topology_of
from fcdp_compile.core.ranks import process_groups
from fcdp_compile.torch_compat.distributed import gloo_timeout
from tests.distributed.ranks import kill, start

pytestmark = pytest.mark.distributed

WAIT_S = 5.0
FAR_S = 600.0
LATE_BY_S = 4.0
LIMIT_S = 120.0
"""For a whole case: start, compile and notice the lost rank."""

_STEP = 2  # the third step, when everything is compiled


def _trains(mesh: DeviceMesh, case: Case, folder: str) -> tuple[str, float]:
    """Train until one rank is lost; returns the error of another rank, and how long that rank waited."""
    step, began_s, rank = 0, 0.0, dist.get_rank()

    def here(place: str) -> None:
        if step == _STEP and rank == case.rank and place == case.place:
            case.act(Path(folder, "acted"))

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model: Any = fcdp_compile.shard(net, mesh)
    if case.compiled:
        model = torch.compile(model, backend="fcdp", options={"compute": "eager"})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        for step in range(_STEP + 20):
            began_s = time.monotonic()
            here("forward")
            loss = model(torch.ones(1, 64)).sum()
            loss.register_hook(lambda grad: here("backward"))
            loss.backward()
            here("clip")
            if case.place == "clip":
                began_s = time.monotonic()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            here("save")
            if case.place == "save":
                began_s = time.monotonic()
                fcdp_compile.save(f"{folder}/saved", model=net, step=step)
    except BaseException as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began_s
    return "nothing was raised", 0.0


def _stop(mark: Path) -> None:
    mark.touch()
    os.kill(os.getpid(), signal.SIGSTOP)


def _die(mark: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _be_late(mark: Path) -> None:
    time.sleep(WAIT_S + LATE_BY_S)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trouble of one rank; how long the others wait, and what they say."""

    rank: int
    place: str
    act: Callable[[Path], None]
    says: str
    wait_s: float = WAIT_S
    ranks_per_node: int = 1
    compiled: bool = False
    is_interrupted: bool = False


CASES = {
    "stopped": Case(
        rank=3,
        place="backward",
        act=_stop,
        ranks_per_node=2,
        compiled=True,
        # Rank 0 hosts the store, and may have left when a later rank asks who is missing.
        says=r"LostRankError: the backward pass of step 3, \w+ of bucket 0 \(0.weight, …\): "
        r"(rank 3 did not|rank 0 cannot be reached)",
    ),
    "killed": Case(
        rank=1,
        place="save",
        act=_die,
        wait_s=FAR_S,
        says=r"LostRankError: saving to \S+: rank 1 did not join; find the cause",
    ),
    "killed before clipping": Case(
        rank=1,
        place="clip",
        act=_die,
        wait_s=FAR_S,
        says=r"LostRankError: a sharded tensor's own collective, as in clip_grad_norm_ or full_tensor: "
        r"rank 1 did not join; find the cause",
    ),
    "host of the store": Case(
        rank=0,
        place="forward",
        act=_die,
        wait_s=FAR_S,
        says=r"LostRankError: the agreement before a rank gathers parameter '0.weight': rank 0 cannot be "
        r"reached",
    ),
    "late": Case(
        rank=0,
        place="backward",
        act=_be_late,
        says=r"LostRankError: the agreement before a rank reduces the gradient of parameter '\S+': rank 0",
    ),
    "Ctrl-C": Case(
        rank=1,
        place="forward",
        act=_stop,
        wait_s=FAR_S,
        is_interrupted=True,
        says="KeyboardInterrupt: ",
    ),
}
Started = dict[str, tuple[list[BaseProcess], list[Connection], Path]]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Start the ranks of every case."""
    jobs: Started = {}
    try:
        for name, case in CASES.items():
            folder = tmp_path_factory.mktemp("job")
            processes, pipes = start(
                _trains,
                case,
                str(folder),
                nodes=2,
                ranks_per_node=case.ranks_per_node,
                wait_s=case.wait_s,
            )
            jobs[name] = processes, pipes, folder
        yield jobs
    finally:
        for processes, _, _ in jobs.values():
            kill(processes)


LATER = ("stopped", "killed before clipping")
"""What a device with streams learns later, in another collective."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.cpu) if n in LATER else n for n in CASES]
)
def test_the_others_raise_in_time_and_say_who_is_missing(name: str, started: Started) -> None:
    case, (processes, pipes, folder) = CASES[name], started[name]
    others = [rank for rank in range(len(pipes)) if rank != case.rank]
    if case.is_interrupted:
        _interrupt([processes[rank] for rank in others], folder / "acted")
    for rank in others:
        assert pipes[rank].poll(LIMIT_S), f"rank {rank} waits"
        is_error, found = pipes[rank].recv()
        assert not is_error, found
        said, took_s = found
        assert re.match(case.says, said), said
        if case.wait_s == WAIT_S:
            assert took_s > WAIT_S - 1
        processes[rank].join(LIMIT_S)
        assert processes[rank].exitcode == 0, "it does not end"
    if name == "late":
        assert pipes[case.rank].poll(LIMIT_S)
        _, (said, _) = pipes[case.rank].recv()
        assert "every rank joined, but some gave up before others joined" in said


def _interrupt(processes: list[BaseProcess], mark: Path) -> None:
    """Press Ctrl-C once the others have been waiting for a while."""
    until_s = time.monotonic() + LIMIT_S
    while not mark.exists():
        assert time.monotonic() < until_s, "the rank has not come to where it stops"
        time.sleep(0.1)
    time.sleep(1.0)
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)


def _timeouts(mesh: DeviceMesh) -> dict[str, float]:
    def seconds(group: dist.ProcessGroup | None) -> float:
        assert group is not None
        found = gloo_timeout(group)
        assert found is not None
        return found.total_seconds()

    found = {}
    others = init_device_mesh("cpu", (2, 1), mesh_dim_names=("inter", "intra"))
    for name, used in (
        ("made", mesh),
        ("theirs", others),
        ("chosen", fcdp_compile.make_mesh(2, timeout=90)),
    ):
        topology = topology_of(used)
        found |= {
            f"{name} inter": seconds(topology.inter),
            f"{name} control": seconds(topology.control),
            f"{name} of saves": seconds(new_control_group(topology)),
        }
        if name != "theirs":
            found[f"{name} mesh"] = seconds(used["inter"].get_group())
    return found | {"default": seconds(dist.group.WORLD)}


def test_every_group_waits_as_long_as_the_default_group_unless_told() -> None:
    processes, pipes = start(_timeouts, nodes=2, ranks_per_node=1, wait_s=70)
    try:
        for pipe in pipes:
            assert pipe.poll(LIMIT_S)
            is_error, found = pipe.recv()
            assert not is_error, found
            assert set(found) > {"made inter", "made mesh", "theirs control", "chosen control"}
            wrong = {k: v for k, v in found.items() if v != (90 if k.startswith("chosen") else 70)}
            assert wrong == {}
    finally:
        kill(processes)


_NCCLS, _GLOOS, _USERS, _GIVEN = (timedelta(seconds=s) for s in (600, 1800, 10, 20))


@pytest.mark.parametrize(
    ("given", "gloo", "nccl", "expected"),
    [
        (None, _GLOOS, None, _GLOOS),
        (None, _USERS, None, _USERS),
        (None, _USERS, _USERS, _USERS),
        (None, None, _NCCLS, None),  # no timeout chosen: torch's default for each backend
        (None, None, _USERS, _USERS),
        (None, None, None, None),  # a backend that does not tell its timeout
        (_GIVEN, _USERS, _USERS, _GIVEN),
        (_GIVEN, None, _NCCLS, _GIVEN),
    ],
)
def test_the_timeout_of_new_groups(
    given: timedelta | None,
    gloo: timedelta | None,
    nccl: timedelta | None,
    expected: timedelta | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_groups, "world", lambda: None)
    monkeypatch.setattr(process_groups, "gloo_timeout", lambda group: gloo)
    monkeypatch.setattr(process_groups, "nccl_timeout", lambda group: nccl)
    monkeypatch.setattr(process_groups, "default_pg_nccl_timeout", _NCCLS)
    assert process_groups.timeout_of_new_groups(given) == expected


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(0, ValueError), (-1.0, ValueError), ("10", TypeError), (True, TypeError)],
)
def test_a_timeout_that_is_none(timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="timeout must be"):
        fcdp_compile.make_mesh(timeout=timeout)
