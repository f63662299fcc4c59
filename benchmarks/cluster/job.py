"""Runs one torchrun on each node, from the job's start to its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.cluster.arguments import Request
from benchmarks.cluster.nodes import Nodes
from benchmarks.cluster.processes import is_rank
from benchmarks.cluster.report import Cable, Report
from benchmarks.cluster.trouble import Timetable

_PORT = 29500  # always free: every cluster is a network of its own
_TIMED_OUT = 124  # as timeout(1) exits
_LINES_SHOWN = 15


def run(request: Request, nodes: Nodes) -> Report:
    """Run the job to its end and return the report; show the ends of the logs if the job failed."""
    logs = request.logs or Path(tempfile.mkdtemp(prefix="fcdp-cluster-"))
    try:
        report = _run(request, nodes, logs)
    except BaseException:
        _remove_unasked(request, logs)
        raise
    if report.exit_code:
        _show_ends(logs)
    else:
        _remove_unasked(request, logs)
    return report


def _run(request: Request, nodes: Nodes, logs: Path) -> Report:
    before = [nodes.traffic(node) for node in range(len(nodes))]
    began = time.monotonic()
    jobs = [_start(request, nodes, node, logs / f"node{node}") for node in range(len(nodes))]
    code = _wait(request, nodes, jobs, began)
    seconds = time.monotonic() - began
    after = [nodes.traffic(node) for node in range(len(nodes))]
    nodes.end_processes()
    links = [
        Cable(
            node=node,
            address=nodes.address(node),
            exit_code=_exit_code(jobs[node].wait()),
            sent_bytes=after[node].sent_bytes - before[node].sent_bytes,
            received_bytes=after[node].received_bytes - before[node].received_bytes,
        )
        for node in range(len(nodes))
    ]
    return Report(
        nodes=request.nodes,
        ranks_per_node=request.ranks_per_node,
        bits_per_s=request.bits_per_s,
        seconds=round(seconds, 2),
        exit_code=code,
        links=links,
    )


def _start(request: Request, nodes: Nodes, node: int, logs: Path) -> subprocess.Popen[Any]:
    """Start the ranks of one node.  Rank 0 of the job prints here, all other ranks into files."""
    logs.mkdir(parents=True, exist_ok=True)
    # For torchrun, 3 means stdout and stderr, of every rank or of the listed ranks.
    to_files = "3"
    if node == 0:
        to_files = ",".join(f"{rank}:3" for rank in range(1, request.ranks_per_node)) or "0"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={request.nodes}"]
    command += [f"--node-rank={node}", f"--nproc-per-node={request.ranks_per_node}"]
    command += [f"--master-addr={nodes.address(0)}", f"--master-port={_PORT}"]
    command += [f"--log-dir={logs}", f"--redirects={to_files}", *request.command]
    # torch warns that addresses of nodes have no names.
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}
    with (logs / "torchrun.log").open("w") as log:
        output: Any = log
        if node == 0:
            output = sys.stderr if request.as_json else None
        return nodes.start(
            node,
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if node == 0 else log,
            start_new_session=True,  # a Ctrl-C at the terminal is for this process alone
        )


def _wait(request: Request, nodes: Nodes, jobs: list[subprocess.Popen[Any]], began: float) -> int:
    """Wait until all nodes end, and bring the requested troubles to them meanwhile; returns the exit code.

    Once one node has failed, the others have `request.grace_s` to end.
    """
    timetable = Timetable(
        nodes, cuts=request.cuts, slow=request.slow, stragglers=request.stragglers
    )
    first_failure: int | None = None
    ranks_began_s: float | None = None
    until_s = request.timeout_s or float("inf")
    while None in (codes := [job.poll() for job in jobs]):
        now_s = time.monotonic() - began
        if first_failure is None and any(codes):
            first_failure = next(_exit_code(code) for code in codes if code)
            until_s = min(until_s, now_s + request.grace_s)
        if now_s > until_s:
            return first_failure or _TIMED_OUT
        if ranks_began_s is None and _all_ranks_run(request, nodes):
            ranks_began_s = time.monotonic()
        time.sleep(min(timetable.advance(ranks_began_s), max(until_s - now_s, 0.001)))
    return first_failure or max(_exit_code(code) for code in codes if code is not None)


def _all_ranks_run(request: Request, nodes: Nodes) -> bool:
    return all(
        sum(map(is_rank, nodes.processes(node))) >= request.ranks_per_node
        for node in range(len(nodes))
    )


def _remove_unasked(request: Request, logs: Path) -> None:
    if request.logs is None:
        shutil.rmtree(logs, ignore_errors=True)  # an ending process may still write there


def _exit_code(code: int) -> int:
    """Return the code as a shell does: 128 + the signal's number if a signal ended the process."""
    return 128 - code if code < 0 else code


def _show_ends(logs: Path) -> None:
    for log in sorted(logs.rglob("*.log")):
        if lines := log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES_SHOWN:]:
            print(f"--- end of {log}", *lines, sep="\n", file=sys.stderr)
    print(f"--- the logs are kept in {logs}", file=sys.stderr)
