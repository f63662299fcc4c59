"""Save and load at 2 x 2: bitwise resumption, ranks that differ, fail or die, saves beside training."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from fcdp_compile.devices import current_device
from fcdp_compile.errors import CheckpointError, LostRankError
from fcdp_compile.models.checkpointing.contents import JobObjects as Given
from fcdp_compile.models.checkpointing.format.disk import Disk
from fcdp_compile.models.checkpointing.saving import save_on
from tests.distributed.jobs import WORKS, Verdicts, asked, message_of, rows, run_jobs
from tests.distributed.jobs_checkpoint import Job, Noisy, assert_same
from tests.distributed.models import CASES
from tests.distributed.ranks import RankError, run
from tests.distributed.released import frozen_of, make_pair, there

pytestmark = pytest.mark.distributed


@contextmanager
def shared_folder() -> Iterator[str]:
    """A folder that rank 0 makes and removes."""
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    yield folders[0]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])


def _resumes_bitwise(mesh: DeviceMesh) -> None:
    with shared_folder() as folder:
        job = Job(mesh, compiled=True)
        job.train(3)
        job.save(folder)
        wanted, buffers = job.train(3), job.local_values()
        values = job.values()
        again = Job(mesh, compiled=True)
        again.train(1)  # so that caches are warm, and the load must make them stale
        loaded = again.load(folder)
        assert loaded.step == again.position.given == 3
        assert loaded.extra["best"] == float("inf")
        assert again.train(3) == wanted
        assert_same(again.values(), values)
        assert_same(again.local_values(), buffers)


def _copies_are_written_once(mesh: DeviceMesh) -> None:
    with shared_folder() as folder:
        sizes = {}
        for strategy in ("zero3", "mics", "ddp"):
            model = fcdp_compile.shard(torch.nn.Linear(64, 640), mesh, strategy=strategy)
            fcdp_compile.save(folder, model=model)
            files = Path(folder).glob("data-*/*")
            sizes[strategy] = sum(f.stat().st_size for f in files)
            dist.barrier()  # before the next save removes them
        whole = 4 * 640 * 65
        state = current_device().rng_state()  # a device adds a generator on each rank
        most = whole + 60_000 + (0 if state is None else dist.get_world_size() * state.nbytes)
        assert all(whole < size < most for size in sizes.values()), sizes


def _what_ranks_have_apart_comes_back(mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    with shared_folder() as folder:
        model = fcdp_compile.shard(Noisy(), mesh)
        model.normalised.running_mean.fill_(rank)
        fcdp_compile.save(folder, model=model, extra={"rank": rank, "all": "alike"})
        model.normalised.running_mean.fill_(-1)
        loaded = fcdp_compile.load(folder, model=model)
        assert loaded.extra == {"rank": rank, "all": "alike"}
        assert model.normalised.running_mean.eq(rank).all()


def _beside_training(mesh: DeviceMesh) -> None:
    with shared_folder() as folder:
        job = Job(mesh, compiled=True)
        job.train(2)
        wanted = job.values()
        pending = job.save(folder, asynchronous=True)
        job.train(2)
        second = job.save(f"{folder}/second", asynchronous=True)
        assert pending.done, "the second waits for the first"
        job.train(1)
        second.wait()
        again = Job(mesh)
        assert again.load(folder).step == 2
        found = again.values()
        assert_same(
            {n: v for n, v in found.items() if "running" not in n},
            {n: v for n, v in wanted.items() if "running" not in n},
        )
        assert again.load(f"{folder}/second").step == 4


def _ranks_that_differ(mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    with shared_folder() as folder:
        job = Job(mesh)
        optimizer = job.optimizer if rank else None
        error = message_of(
            CheckpointError,
            lambda: fcdp_compile.save(folder, model=job.model, optimizer=optimizer),
        )
        assert "are about to save different things" in error, error
        error = message_of(
            CheckpointError, lambda: fcdp_compile.save(folder, model=job.model, step=rank // 3)
        )
        assert "ranks 0 and 3 are about to save different things" in error, error
        extra = {"bad": {1}} if rank == 2 else {}
        error = message_of(
            CheckpointError, lambda: fcdp_compile.save(folder, model=job.model, extra=extra)
        )
        assert "rank 2: extra['bad'] is a builtins.set" in error, error
        error = message_of(
            CheckpointError,
            lambda: fcdp_compile.save(f"{folder}/of-{rank % 2}", model=job.model),
        )
        assert "save to a folder that all nodes share" in error, error
        dist.barrier()  # rank 0 tidies up after the others have raised
        assert not list(Path(folder).glob("**/data-*")), "what was begun is gone"
        dist.barrier()
        job.save(folder)
        given = job.scheduler if rank else None
        error = message_of(
            CheckpointError, lambda: fcdp_compile.load(folder, model=job.model, scheduler=given)
        )
        assert "about to load different things" in error, error


class Full(Disk):
    """A disk that is full on one rank only."""

    def __init__(self, rank: int) -> None:
        self._is_full = dist.get_rank() == rank

    def reached(self, point: str) -> None:
        if self._is_full and point == "wrote data":
            raise OSError(28, "No space left on device")


def _given(job: Job) -> Given:
    return Given(optimizer=job.optimizer, scheduler=None, scaler=None, extra=None)


def _a_full_disk(mesh: DeviceMesh) -> None:
    with shared_folder() as folder:
        job = Job(mesh)
        job.save(folder)
        for asynchronous in (False, True):

            def save(asynchronous: bool = asynchronous) -> None:
                save_on(
                    Full(3), Path(folder), job.model, _given(job), 9, asynchronous=asynchronous
                ).wait()

            error = message_of(CheckpointError, save)
            assert "rank 3: cannot write" in error, error
            assert "No space left" in error, error
        assert job.load(folder).step == 0
        dist.barrier()
        assert len(list(Path(folder).glob("*"))) == 2


def _one_damaged_file(mesh: DeviceMesh) -> None:
    """Only rank 3's file: the others need not read it, but must not go on without rank 3."""
    with shared_folder() as folder:
        job = Job(mesh)
        job.train(1)
        job.save(folder)
        job.train(1)
        before, rng = job.values(), torch.get_rng_state()
        paths = sorted(Path(folder).glob("data-*/*"))
        dist.barrier()
        if dist.get_rank() == 0:
            raw = bytearray(paths[3].read_bytes())
            raw[-1] ^= 1
            paths[3].write_bytes(raw)
        dist.barrier()
        error = message_of(CheckpointError, lambda: job.load(folder))
        assert "rank-00003.safetensors is damaged" in error, error
        if dist.get_rank() == 0:
            raw[-1] ^= 1
            paths[3].write_bytes(raw)
            swapped = [p.read_bytes() for p in paths[1:3]]
            for path, data in zip(paths[1:3], reversed(swapped), strict=True):
                path.write_bytes(data)
        dist.barrier()
        assert "safetensors" in message_of(CheckpointError, lambda: job.load(folder))
        assert_same(job.values(), before)
        assert torch.equal(torch.get_rng_state(), rng)


def _from_meta(mesh: DeviceMesh) -> None:
    with shared_folder() as folder:
        job = Job(mesh, strategy="zero3")
        job.train(1)
        job.save(folder)
        with torch.device("meta"):
            model = Noisy()
        model.scratch = torch.zeros(3)
        fcdp_compile.shard(model, mesh)
        fcdp_compile.load(folder, model=model)
        found = {n: p.to_local() for n, p in model.named_parameters()}
        assert_same(found, {n: p.to_local() for n, p in job.model.named_parameters()})
        fcdp_compile.save(folder, model=model)


def _waiting_gradients(mesh: DeviceMesh) -> None:
    with shared_folder() as folder:
        job = Job(mesh, compiled=True)
        ids = torch.zeros(2, 8, dtype=torch.int64)
        with fcdp_compile.no_sync(job.net):
            job.net(ids).sum().backward()
        error = message_of(CheckpointError, lambda: job.save(folder))
        assert "would be lost, so save after optimizer.step()" in error, error
        job.net(ids).sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.save(folder)


def _released_shards_stay_away(mesh: DeviceMesh) -> None:
    """Saving reads frozen shards on the host, and takes no memory of the device for them."""
    with shared_folder() as folder:
        pair = make_pair(mesh)
        before = there(pair.model)
        assert len(before) < len(frozen_of(pair.model)), "some are released"
        fcdp_compile.save(folder, model=pair.model, optimizer=pair.optimizer)
        assert there(pair.model) == before
        other = fcdp_compile.shard(CASES["odd-lora"].model(), mesh, strategy="zero3")
        fcdp_compile.load(folder, model=other)
        wanted = {n: p.to_local().clone() for n, p in pair.model.named_parameters()}
        assert_same({n: p.to_local() for n, p in other.named_parameters()}, wanted)
        # Loading overwrites released values as it does others.
        pair.train(1)
        assert len(there(pair.model)) == len(before)
        fcdp_compile.load(folder, model=pair.model, optimizer=pair.optimizer)
        assert_same({n: p.to_local() for n, p in pair.model.named_parameters()}, wanted)


_JOBS: dict[str, Any] = {
    "resumes bitwise": _resumes_bitwise,
    "copies are written once": _copies_are_written_once,
    "what ranks have apart comes back": _what_ranks_have_apart_comes_back,
    "beside training": _beside_training,
    "ranks that differ": _ranks_that_differ,
    "a full disk": _a_full_disk,
    "one damaged file": _one_damaged_file,
    "from meta": _from_meta,
    "waiting gradients": _waiting_gradients,
    "released shards stay away": _released_shards_stay_away,
}


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> Verdicts:
    return run_jobs(asked(request, _JOBS), nodes=2, ranks_per_node=2)


@pytest.mark.parametrize("job", rows(_JOBS, slow=["released shards stay away"]))
def test_checkpoint(verdicts: Verdicts, job: str) -> None:
    assert [v[job] for v in verdicts] == [WORKS] * 4


class Deadly(Disk):
    """Ends rank 1 while it writes."""

    def reached(self, point: str) -> None:
        if dist.get_rank() == 1 and point == "wrote data":
            os._exit(9)


def _with_a_rank_that_dies(mesh: DeviceMesh, folder: str) -> None:
    job = Job(mesh)
    job.save(f"{folder}/saved")
    error = message_of(
        LostRankError,
        lambda: save_on(Deadly(), Path(folder, "saved"), job.model, _given(job), 9),
    )
    Path(folder, f"rank-{dist.get_rank()}").write_text(error)
    os._exit(0)  # with a dead rank the group cannot be destroyed in order


def test_a_rank_that_dies_stops_the_others_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1\n"):
        run(_with_a_rank_that_dies, str(tmp_path), nodes=1, ranks_per_node=2)
    assert ": rank 1 did not join" in (tmp_path / "rank-0").read_text()
    assert Job(None, strategy="zero3").load(str(tmp_path / "saved")).step == 0
    assert len(list((tmp_path / "saved").iterdir())) == 2
