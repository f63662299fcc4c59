"""A process that is killed at any point of a save leaves the old or the new checkpoint, whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointing.small import Small, Watched
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.format.disk import Disk


def _die_while_saving(job: Small, folder: Path, kill_at: int) -> None:
    """Save and die in a child process, as a killed process runs no `finally`."""
    if (child := os.fork()) == 0:
        try:
            job.save(folder, disk=Watched(kill_at), step=2)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9, "it was killed"


@pytest.fixture(scope="module")
def jobs() -> Iterator[list[Small]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has only one of the threads
    old, new = Small(1), Small(2)
    old.train(1)
    new.train(3)
    yield [old, new]
    torch.set_num_threads(threads)


def _points(jobs: list[Small], folder: Path, *, over: bool) -> list[str]:
    if over:
        jobs[0].save(folder)
    disk = Watched()
    jobs[1].save(folder, disk=disk, step=2)
    return disk.points


@pytest.mark.parametrize(
    "over", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["over another", "the first"]
)
def test_a_save_killed_at_any_point(jobs: list[Small], tmp_path: Path, over: bool) -> None:
    points = _points(jobs, tmp_path / "points", over=over)
    renamed = points.index("renamed record")
    wanted = [job.state()["tensors"] for job in jobs]
    reader = Small(3)
    for number, point in enumerate(points):
        folder = tmp_path / f"{number}"
        if over:
            jobs[0].save(folder)
        _die_while_saving(jobs[1], folder, number)
        # A point comes after its action: at "renamed" the new checkpoint is there.
        is_new = number >= renamed
        if over or is_new:
            loaded = reader.load(folder)
            assert loaded.step == (2 if is_new else 1), point
            assert reader.state()["tensors"] == wanted[is_new], point
        else:
            with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
                reader.load(folder)
        jobs[1].save(folder, step=3)
        assert reader.load(folder).step == 3, point
        assert len(list(folder.iterdir())) == 2, f"remains of {point} are gone"


def test_what_a_record_names_is_on_the_disk_before_it(jobs: list[Small], tmp_path: Path) -> None:
    """After a crash of the machine only synced files are left; killing a process does not show that."""
    points = _points(jobs, tmp_path, over=True)
    kinds = [p for i, p in enumerate(points) if i == 0 or points[i - 1] != p]
    assert kinds == [
        "made folder",
        "made data folder",
        "synced folder",
        "wrote data",
        "synced data",
        "synced folder",
        "opened record",
        "wrote record",
        "synced record",
        "renamed record",
        "synced folder",
        "removed data",
        "removed data folder",
    ]
    assert points.count("wrote data") > 10, "each tensor is a point"


def test_only_what_is_ours_is_removed(jobs: list[Small], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    others = {
        "data-0123456789abcdef/notes.txt": "kept",
        "data-mine/rank-00000.safetensors": "kept",
        "data": "kept",
        "events/log": "kept",
    }
    for name, text in others.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "data-00000000000000ff").symlink_to(folder / "data-mine")
    (folder / "data-0123456789abcdef/rank-00003.safetensors").write_text("left by a killed save")
    jobs[0].save(folder)
    assert all((folder / name).read_text() == text for name, text in others.items())
    assert (folder / "data-00000000000000ff").is_symlink()
    assert not (folder / "data-0123456789abcdef/rank-00003.safetensors").exists()


class Failing(Disk):
    def __init__(self, point: str) -> None:
        self._point = point

    def reached(self, point: str) -> None:
        if point == self._point:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "point", ["made folder", "wrote data", "synced data", "wrote record", "synced record"]
)
def test_a_full_disk_leaves_the_checkpoint_before(
    jobs: list[Small], tmp_path: Path, point: str
) -> None:
    jobs[0].save(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"No space left on device"):
        jobs[1].save(tmp_path, disk=Failing(point), step=2)
    assert sorted(tmp_path.rglob("*")) == before, "the disk is as full as before"
    assert Small(3).load(tmp_path).step == 1


def test_a_record_that_could_not_be_read_again_is_not_written(
    jobs: list[Small], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs[0].save(tmp_path)
    monkeypatch.setattr("fcdp_compile.models.checkpointing.format.disk.MAX_FILE_BYTES", 5000)
    with pytest.raises(CheckpointError, match="may have 5000; give long lists"):
        jobs[1].save(tmp_path, step=2)
    assert Small(3).load(tmp_path).step == 1


def test_a_record_that_is_there_keeps_its_data(jobs: list[Small], tmp_path: Path) -> None:
    """If something fails after the rename, neither checkpoint's data may be deleted."""
    jobs[0].save(tmp_path)
    with pytest.raises(CheckpointError, match=r"No space"):
        jobs[1].save(tmp_path, disk=Failing("renamed record"), step=2)
    assert len(list(tmp_path.glob("data-*"))) == 2
    assert Small(3).load(tmp_path).step == 2


def test_data_of_an_unreadable_record_is_left_until_there_is_a_new_one(
    jobs: list[Small], tmp_path: Path
) -> None:
    jobs[0].save(tmp_path)
    (tmp_path / "checkpoint.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"No space"):
        jobs[1].save(tmp_path, disk=Failing("wrote data"), step=2)
    assert list(tmp_path.glob("data-*/rank-00000.safetensors")), "somebody may mend the record"
    jobs[1].save(tmp_path, step=2)
    assert len(list(tmp_path.glob("data-*"))) == 1
