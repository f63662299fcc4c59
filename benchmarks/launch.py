"""Start a job's processes on simulated nodes and collect their rows; needs only the standard library.

`python -m benchmarks.launch` says in one sentence why the benchmark cannot run here and exits with 1, or
says nothing and exits with 0.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.cluster.nodes import why_not
from benchmarks.reporting.rows import Failure, ResultRow, read_rows
from benchmarks.running.job import BenchmarkJob

ROOT = Path(__file__).resolve().parents[1]
_CLEAN_UP_S = 60.0  # for the nodes to be removed after a timeout


def cluster_command(nodes: int, ranks_per_node: int, *, timeout_s: float, logs: Path) -> list[str]:
    """Return the beginning of a command line that runs a script on every rank; append the script to it.

    The command must run in ROOT, or with ROOT in PYTHONPATH.
    """
    command = [sys.executable, "-m", "benchmarks.cluster", "--nodes", str(nodes)]
    command += ["--ranks-per-node", str(ranks_per_node), "--timeout", str(int(timeout_s))]
    return [*command, "--log-dir", str(logs), "--"]


def on_ranks(ranks: int, *script: str) -> int:
    """Run a script, or "-m" and a module, on ranks of this machine; returns the exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def run_job(job: BenchmarkJob, *, folder: Path, timeout_s: float) -> list[ResultRow] | Failure:
    """Run one job in fresh processes; returns its rows, or why there are none.

    folder: for the job's files and the logs of all ranks.
    """
    name = f"{job.round}-{job.mode}-{job.system}"
    job_file, rows_file, logs = (folder / f"{name}{end}" for end in (".job", ".rows", "-logs"))
    rows_file.unlink(missing_ok=True)
    shutil.rmtree(logs, ignore_errors=True)
    job_file.write_text(job.to_json(), encoding="utf-8")
    command = cluster_command(job.nodes, job.ranks_per_node, timeout_s=timeout_s, logs=logs)
    command += [str(ROOT / "benchmarks" / "running" / "worker.py"), str(job_file), str(rows_file)]
    output = folder / f"{name}.log"
    with output.open("w", encoding="utf-8") as out:
        # A killed launcher would leave its nodes behind; a launcher whose own timeout ends it removes them.
        done = subprocess.run(
            command,
            env=_environment(folder),
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=timeout_s + _CLEAN_UP_S,
        )
    if done.returncode == 0 and (rows := read_rows(rows_file)):
        return rows
    why = "it took too long" if done.returncode == 124 else _last_error(output)
    return Failure(system=job.system, mode=job.mode, why=f"{why} (exit {done.returncode})")


def _environment(folder: Path) -> dict[str, str]:
    binaries = Path(sys.executable).parent  # DeepSpeed looks for ninja on PATH
    return {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        # One cache for all launches, so that only a system's first launch runs the C++ compiler.
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


def _last_error(log: Path) -> str:
    """Return the last line of a log that names an exception, or else the last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
    errors = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return (errors or lines)[-1].strip()


if __name__ == "__main__":
    if (reason := why_not()) is not None:
        sys.exit(f"make bench: {reason}")
