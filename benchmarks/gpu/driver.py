"""Run parts one after the other, each in processes of its own, within one limit of time.

A part gets a share of the time left, by its weight among the parts still to come; time that a part does not
need goes to the parts after it.  However a part ends, the next part starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.linked import link_tree
from benchmarks.gpu.parts import GpuPart
from benchmarks.gpu.results import Ending, Outcome, read_found, write_outcome
from benchmarks.running.machine import MachineRecord

Command = Callable[[GpuPart, Path, float], list[str]]
"""Makes the command of a part's processes, from the part, the file to write and the seconds to use."""

EXIT_NOT_RUN = 77  # the last line of output says why
STACKS = signal.SIGUSR1
"""A part's process prints the stacks of its threads on it."""

_LOOK_S = 0.05
_PEERS_S = 3.0  # time for the other ranks to report their errors once one rank has failed
_STACKS_S = 0.5
_KEPT_LINES = 20
_RAISED = re.compile(r"[\w.]*(Error|Exception|Errors)(: |$)")  # at the end of a traceback
_OWN_SHARE = 0.8  # of its limit; after this time a part skips all optional work


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How the processes of a part ended.  code: of the first failed rank; None if time ran out."""

    code: int | None
    lines: list[str]


def run_parts(
    parts: Sequence[GpuPart],
    *,
    command: Command,
    folder: Path,
    budget_s: float,
    device: str,
    ended: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run the parts; each outcome is written to PART.json in the folder and passed to `ended` at once.

    What the ranks of a part print stays in PART-RANK.log beside it, unless the part is done.

    device: the hardware's name in the outcomes.
    """
    until_s = time.monotonic() + budget_s
    machine = MachineRecord.here()
    outcomes = []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = link_tree(Path(scratch) / "tree")
        for i, part in enumerate(parts):
            left_s = until_s - time.monotonic()
            limit_s = left_s * part.weight / sum(p.weight for p in parts[i:])
            found_file = Path(scratch) / part.name / "found.json"
            found_file.parent.mkdir()
            began_s = time.monotonic()
            logs = [folder / f"{part.name}-{rank}.log" for rank in range(part.ranks)]
            result = _run(
                part, command(part, found_file, limit_s * _OWN_SHARE), limit_s, logs, tree
            )
            state, reason = _told(result, limit_s)
            if state is Ending.DONE:
                for log in logs:
                    log.unlink()
            outcome = Outcome(
                part=part.name,
                state=state,
                reason=reason,
                elapsed_s=round(time.monotonic() - began_s, 1),
                limit_s=round(limit_s, 1),
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                device=device,
                machine=machine,
                printed=result.lines,
                found=read_found(found_file),
            )
            write_outcome(folder / f"{part.name}.json", outcome)
            for more in found_file.parent.glob("*.gz"):
                shutil.copy(more, folder / more.name)
            outcomes.append(outcome)
            ended(outcome)
    return outcomes


def _run(
    part: GpuPart, command: list[str], limit_s: float, logs: Sequence[Path], tree: Path
) -> _Ended:
    until_s = time.monotonic() + limit_s
    with _started(part, command, logs, tree) as processes:
        codes: list[int | None] = [None] * part.ranks
        while None in codes and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
            codes = [p.poll() for p in processes]
            if any(codes):  # the other ranks wait for the one that failed
                until_s = min(until_s, time.monotonic() + _PEERS_S)
        bad = [rank for rank, code in enumerate(codes) if code]
        running = [rank for rank, code in enumerate(codes) if code is None]
        if running:
            for rank in running:
                processes[rank].send_signal(STACKS)
            time.sleep(_STACKS_S)
    worst = (bad or running or [0])[0]
    return _Ended(code=codes[worst], lines=_last_lines(logs[worst]))


@contextlib.contextmanager
def _started(
    part: GpuPart, command: list[str], logs: Sequence[Path], tree: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process for each rank, in a session of its own; kill them all on exit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        command,
                        env=_environment(part, rank, port, tree),
                        cwd=tree,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            _kill(process)


def _environment(part: GpuPart, rank: int, port: int, tree: Path) -> dict[str, str]:
    found = {**os.environ, **part.environment, "PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}
    if part.ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": part.ranks, "MASTER_PORT": port}
        found |= {name: str(value) for name, value in place.items()}
        found |= {"LOCAL_WORLD_SIZE": str(part.ranks), "MASTER_ADDR": "127.0.0.1"}
    return found


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its group has its id
    process.wait()


def _told(result: _Ended, limit_s: float) -> tuple[Ending, str]:
    raised = [line for line in result.lines if _RAISED.match(line)]
    last = (raised or result.lines or ["it printed nothing"])[-1]
    if result.code is None:
        return Ending.TIMEOUT, f"it was ended after {limit_s:.0f} s; its last line: {last}"
    if result.code == 0:
        return Ending.DONE, ""
    if result.code == EXIT_NOT_RUN:
        return Ending.NOT_RUN, last
    if result.code < 0:
        name = signal.Signals(-result.code).name
        return Ending.FAILED, f"{name} ended it; its last line: {last}"
    return Ending.FAILED, f"it failed with exit status {result.code}: {last}"


def _last_lines(log: Path) -> list[str]:
    """Return the last lines of a log that are not empty, without torch's prefixes."""
    lines = log.read_text(errors="replace").splitlines()
    told = [re.sub(r"^\[rank\d+\]:\s?", "", line).rstrip() for line in lines]
    return [line for line in told if line and not line.startswith("USDT:")][-_KEPT_LINES:]
