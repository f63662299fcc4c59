"""A process that is killed at any point of a commit leaves the step before, or this one, whole in memory."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fcdp_compile
from checkpointing.small import Small, Watched
from fcdp_compile.cluster import node_memory
from fcdp_compile.errors import ArgumentError, CheckpointError, FcdpError
from fcdp_compile.models.survival.states import NeighboursMemory


class WatchedMemory(Watched, NeighboursMemory):
    """Watches a save to the memory of a node."""

    def __init__(self, memory: Path, kill_at: int = -1) -> None:
        Watched.__init__(self, kill_at)
        NeighboursMemory.__init__(self, memory)


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
    keeper._disk = disk = WatchedMemory(keeper._memory.folder)
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
            keeper._disk = WatchedMemory(keeper._memory.folder, kill_at)
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
    job, other = _job(), _job(2)
    job.train(3)
    fcdp_compile.save(tmp_path / "saved", job.model, optimizer=job.optimizer, step=3)

    def base() -> int | None:
        return fcdp_compile.load(tmp_path / "saved", other.model, optimizer=other.optimizer).step

    keeper = fcdp_compile.survive(other.model, other.optimizer, base=base, job="job")
    assert keeper.step == 3
    assert other.state()["tensors"] == job.state()["tensors"]
    keeper.close()


def test_frozen_parameters_that_change_are_kept_again() -> None:
    job = _job()
    keeper = _keeper(job, "job")
    weight = job.model.first.weight
    for act in (
        lambda: weight.requires_grad_(False),
        lambda: weight.detach().mul_(2),
        lambda: None,
        lambda: weight.requires_grad_(True),
    ):
        act()
        _commit(job, keeper)
    weight.requires_grad_(False)
    weight.detach().add_(1)
    _commit(job, keeper)
    expected = job.state()["tensors"]
    keeper.release()
    again = _job(2)
    again.model.first.weight.requires_grad_(False)
    keeper = _keeper(again, "job")
    assert keeper.step == 5
    assert again.state()["tensors"] == expected
    keeper.close()


def test_memory_of_another_model_is_refused(memory: Path) -> None:
    job = _job()
    keeper = _keeper(job, "job")
    _commit(job, keeper)
    keeper.release()
    other = Small(2, width=7)
    with pytest.raises(CheckpointError, match=r"(?s)does not fit this job: .*fcdp clean job"):
        _keeper(other, "job")
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="does not fit"):
        _keeper(other, "job")
    assert _keeper(_job(), "job").step == 1


def test_a_second_keeper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_memory, "_WAIT_S", 0.2)
    keeper = _keeper(_job(), "job")
    with pytest.raises(ArgumentError, match="another process uses"):
        _keeper(_job(2), "job")
    keeper.close()
    with pytest.raises(FcdpError, match="the keeper is closed"):
        keeper.commit()


def test_a_failed_copy_is_told_once(monkeypatch: pytest.MonkeyPatch, memory: Path) -> None:
    job = _job()
    keeper = _keeper(job, "job")
    _commit(job, keeper)

    class Full(NeighboursMemory):
        def write_data(self, *args: Any) -> Any:
            raise OSError(28, "No space left on device")

    whole, keeper._disk = keeper._disk, Full(keeper._memory.folder)
    job.train(1)
    keeper.commit()
    keeper._disk = whole
    job.train(1)
    with pytest.raises(CheckpointError, match="No space left"):
        keeper.commit()
    assert keeper.step == 2
    _commit(job, keeper)
    assert keeper.step == 3
    keeper.close()
    assert not any(memory.iterdir())


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


def test_a_later_step_of_an_earlier_start_stays(memory: Path) -> None:
    """A node that starts alone, before others, does not remove its part of what they have together."""
    job = _job()
    keeper = _keeper(job, "job")
    for _ in range(3):
        _commit(job, keeper)
    keeper.release()
    (node,) = memory.glob("*/node-0")
    newest = next(node.glob("steps/3-*"))
    data = next(newest.glob("data-*/rank-00000.safetensors"))
    hidden = memory / "hidden"
    data.rename(hidden)
    for path in node.glob("steps/2-*/data-*/*"):
        path.unlink()
    alone = _keeper(_job(2), "job")
    assert alone.step == 0
    for _ in range(2):
        _commit(job, alone)
    alone.release()
    hidden.rename(data)
    again = _keeper(_job(3), "job")
    assert again.step == 3
    for _ in range(2):
        _commit(job, again)
    assert sorted(path.name.partition("-")[0] for path in node.glob("steps/*")) == ["4", "5"]
    again.close()
