"""`fcdp` as a process: its streams, its exit code, what it does when it cannot write."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import fcdp_compile
from builders_plan import make_plan
from fcdp_compile.cli import main
from fcdp_compile.plan.json import write_plan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A dump of one graph, with a printed graph beside it."""
    write_plan(tmp_path / "graph-000.plan.json", make_plan())
    (tmp_path / "graph-000.forward.cold.txt").write_text("def forward(self): ...\n")
    return tmp_path


def run(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fcdp_compile.cli", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | changes,
        capture_output=True,
        text=True,
        check=False,
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    version = metadata.version("fcdp")
    assert (ended.value.code, capsys.readouterr().out) == (0, f"fcdp {version}\n")
    assert fcdp_compile.__version__ == version


def test_help_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["dump", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        out, err = capsys.readouterr()
        assert "usage: fcdp" in out
        assert err == ""


def test_as_a_process(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run("dump", folder, NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    main(["dump", str(folder)])
    assert done.stdout == capsys.readouterr().out
    failed = run("dump", folder / "missing")
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.count("\n") == 1


def test_a_terminal_that_cannot_show_a_name(tmp_path: Path) -> None:
    plan = dataclasses.replace(make_plan(), strategy="Größe")
    write_plan(tmp_path / "graph-000.plan.json", plan)
    done = run("dump", tmp_path, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert r"strategy Gr\xf6\xdfe," in done.stdout


@pytest.mark.parametrize("layers", [1, 300])  # less and more than a pipe holds
def test_a_closed_pipe_is_not_an_error(tmp_path: Path, layers: int) -> None:
    plan = make_plan(layers=layers)
    write_plan(tmp_path / "graph-000.plan.json", plan)
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fcdp_compile.cli", "dump", str(tmp_path), "--format", "json"],
            cwd=ROOT,
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told(folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "fcdp_compile.cli", "dump", str(folder)],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "fcdp: standard output: No space left on device\n"
