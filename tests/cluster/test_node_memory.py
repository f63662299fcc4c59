"""Memory of jobs: who has it, who may remove it, and `fcdp clean`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fcdp_compile.cli import main
from fcdp_compile.cluster.node_memory import (
    NodeMemory,
    job_name,
    machine_mark,
    memories,
    memory_root,
)
from fcdp_compile.errors import ArgumentError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FCDP_NODE_MEMORY", str(tmp_path))
    return tmp_path


def test_the_job_is_named_by_who_started_it() -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "job-1", "SLURM_JOB_ID": "7"}
    assert job_name(None, torchrun) == "job-1"
    assert job_name("mine", torchrun) == "mine"
    assert job_name(None, {**torchrun, "TORCHELASTIC_RUN_ID": "none"}) == "7"
    with pytest.raises(ArgumentError, match=r"give torchrun --rdzv-id"):
        job_name(None, {"TORCHELASTIC_RUN_ID": "none"})
    with pytest.raises(ArgumentError, match="job must be a text"):
        job_name(3, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../up", "a/b", "..", "ä", "a" * 65])
def test_any_name_is_one_folder(name: str, root: Path) -> None:
    memory = NodeMemory(root, job_name(name, {}), 0)
    memory.hold(owns=False)
    assert memory.folder.parent.parent == root
    memory.remove()
    assert not any(root.iterdir())


def test_a_missing_root_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FCDP_NODE_MEMORY", "/no/such/folder")
    with pytest.raises(ArgumentError, match="/no/such/folder is no folder"):
        memory_root()


def test_processes_see_the_same_memory(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert machine_mark(tmp_path / "a") == machine_mark(tmp_path / "b")
    assert machine_mark(tmp_path / "a") != machine_mark(tmp_path)


def test_memory_that_is_held_stays(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held, left = NodeMemory(root, "held", 0), NodeMemory(root, "left", 0)
    for memory in (held, left):
        memory.hold(owns=False)
        (memory.folder / "data").write_bytes(b"x" * 2**20)
    left.release()
    assert [(m.job, m.is_used) for m in memories(root)] == [("held", True), ("left", False)]
    assert main(["clean"]) == 0
    assert "1.0 MiB" in (told := capsys.readouterr().out)
    assert "runs" in told
    assert main(["clean", "--all"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "removed left, 1.0 MiB",
        "held is running, and keeps its 1.0 MiB",
    ]
    held.release()
    assert main(["clean", "hold"]) == 2
    assert "'hold' has no memory on this machine" in capsys.readouterr().err
    assert main(["clean", "held"]) == 0
    assert not any(root.iterdir())
    assert main(["clean"]) == 0


def test_a_process_that_is_killed_holds_nothing(root: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; "
        "from fcdp_compile.cluster.node_memory import NodeMemory; "
        f"memory = NodeMemory(Path({str(root)!r}), 'job', 0); memory.hold(owns=True); "
        "print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ)
    assert child.stdout is not None
    assert child.stdout.readline() == b"held\n"
    assert [m.is_used for m in memories(root)] == [True]
    child.kill()
    child.wait()
    assert [m.is_used for m in memories(root)] == [False]


def test_several_processes_hold_a_folder_and_the_last_one_removes_it(root: Path) -> None:
    first, second = NodeMemory(root, "job", 0), NodeMemory(root, "job", 0)
    first.hold(owns=False)
    second.hold(owns=False)
    first.remove()
    assert second.folder.is_dir()
    second.remove()
    assert not any(root.iterdir())
