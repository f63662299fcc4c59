"""A process that is killed at any point of a commit leaves the step before, or this one, whole in memory."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import fcdp_compile
from checkpointing.small import Small
from fcdp_compile.errors import ArgumentError
from fcdp_compile.models.survival.states import NeighboursMemory


class Watched(NeighboursMemory):
    """Counts the points of a save, and kills the process at the point with a given number."""

    def __init__(self, memory: Path, kill_at: int = -1) -> None:
        super().__init__(memory)
        self.points: list[str] = []
        self._kill_at = kill_at

    def reached(self, point: str) -> None:
        if len(self.points) == self._kill_at:
            os._exit(9)
        self.points.append(point)


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FCDP_NODE_MEMORY", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has only one of the threads
    yield tmp_path
    torch.set_num_threads(threads)


def _job(seed: int = 1) -> Small:
    random.seed(seed)
    np.random.seed(seed)
    return Small(seed)


def _keeper(job: Small, name: str, every: int = 1) -> fcdp_compile.Keeper:
    return fcdp_compile.survive(
        job.model, job.optimizer, scheduler=job.scheduler, every=every, job=name
    )


def _commit(job: Small, keeper: fcdp_compile.Keeper) -> None:
    job.train(1)
    keeper.commit(extra={"done": keeper.step + 1})
    keeper._pending.wait()


def _points(name: str) -> list[str]:
    job = _job()
    keeper = _keeper(job, name)
    for _ in range(2):
        _commit(job, keeper)
    keeper._disk = disk = Watched(keeper._memory.folder)
    _commit(job, keeper)
    keeper.close()
    return disk.points


def _die(name: str, kill_at: int) -> None:
    """Commit two steps and die in the third, in a child process, as a killed process runs no `finally`."""
    if (child := os.fork()) == 0:
        try:
            job = _job()
            keeper = _keeper(job, name)
            for _ in range(2):
                _commit(job, keeper)
            keeper._disk = Watched(keeper._memory.folder, kill_at)
            _commit(job, keeper)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9, "it was killed"


def test_a_commit_killed_at_any_point() -> None:
    undisturbed, states = _job(), {}
    for step in (1, 2, 3):
        undisturbed.train(1)
        states[step] = undisturbed.state()
    points = _points("points")
    renamed = points.index("renamed record")
    for number, point in enumerate(points):
        name = f"job-{number}"
        _die(name, number)
        job = _job(7)
        keeper = _keeper(job, name)
        step = 3 if number >= renamed else 2
        assert (keeper.step, keeper.extra) == (step, {"done": step}), point
        assert job.state() == states[step], point
        for later in range(step, 3):
            _commit(job, keeper)
            assert job.state() == states[later + 1], point
        keeper.close()


def test_every_second_step(memory: Path) -> None:
    job = _job()
    keeper = _keeper(job, "job", every=2)
    for _ in range(3):
        _commit(job, keeper)
    del keeper
    again = _keeper(_job(2), "job", every=2)
    assert (again.step, again.extra) == (2, {"done": 2})
    again.close()
    assert not any(memory.iterdir())


def test_with_ends_a_job_unless_it_has_failed(memory: Path) -> None:
    job = _job()
    with contextlib.suppress(ZeroDivisionError), _keeper(job, "job") as keeper:
        _commit(job, keeper)
        raise ZeroDivisionError
    with _keeper(job, "job") as keeper:
        assert keeper.step == 1
    assert not any(memory.iterdir())


def test_first_values_may_come_from_a_checkpoint(tmp_path: Path) -> None:
    job = _job()
    job.train(3)
    fcdp_compile.save(
        tmp_path / "saved", job.model, optimizer=job.optimizer, step=3, extra={"next": 4}
    )
    other = _job(2)
    keeper = fcdp_compile.survive(
        other.model,
        other.optimizer,
        base=lambda: fcdp_compile.load(tmp_path / "saved", other.model, optimizer=other.optimizer),
        job="job",
    )
    assert (keeper.step, keeper.extra) == (3, {"next": 4})
    assert other.state()["tensors"] == job.state()["tensors"]
    keeper.close()


def test_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ArgumentError, match=r"no id .* give torchrun --rdzv-id"):
        fcdp_compile.survive(job.model, job.optimizer)
    with pytest.raises(ArgumentError, match="every must be a whole number above 0, not 0"):
        _keeper(job, "job", every=0)
    with pytest.raises(ValueError, match="not sharded"):
        fcdp_compile.survive(torch.nn.Linear(2, 2), job="job")
