"""Run parts one after the other, each in processes of its own, within one limit of time.

A part gets a share of the time left, by its weight among the parts still to come; time that a part does not
need goes to the parts after it.  However a part ends, the next part starts.  A part that fails may run once
more the plain way, which tells a maintainer more than the first run.
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
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu.linked import link_tree
from benchmarks.gpu.parts import GpuPart
from benchmarks.gpu.results import Ending, Outcome, read_found, write_outcome
from benchmarks.running.machine import MachineRecord

Command = Callable[[GpuPart, Path, float, bool], list[str]]
"""Makes the command of a part's processes: the part, the file to write, the seconds to use, whether plain."""

EXIT_NOT_RUN = 77  # the last line of output says why
STACKS, FLIGHTS = signal.SIGRTMIN + 1, signal.SIGRTMIN + 2
"""A part's process prints the stacks of its threads on one, and writes its last collectives on the other.

Not SIGUSR1 and SIGUSR2: on a card, late processes printed no stacks on SIGUSR1; why is not known.
"""
PLAIN = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "TORCH_DISABLE_ADDR2LINE": "1",  # names of functions will do; files and lines take minutes
}
"""A part that runs again the plain way has these variables too."""

_EVERY_PART = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""The flight recorder of torch's collectives."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOOK_S = 0.05
_PEERS_S = 3.0  # time for the other ranks to report their errors once one rank has failed
_STACKS_S = 1.0
_LEAST_AGAIN_S = 1.0  # in less time no process starts Python
_KEPT_LINES = 20
_RAISED = re.compile(r"[\w.]*(Error|Exception|Errors)(: |$)")  # at the end of a traceback
_FRAME = re.compile(r'  File ".*?(?P<file>[^/"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_SHOWN_CALLS = 6
_OWN_SHARE = 0.8  # of its limit; after this time a part skips all optional work


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """How the processes of a part ended, and what the first failed rank printed.

    code: its exit status; None if time ran out.  told: where it was then, else the last error or line.
    """

    code: int | None
    told: str
    lines: list[str]


def run_parts(
    parts: Sequence[GpuPart],
    *,
    command: Command,
    folder: Path,
    budget_s: float,
    device: str,
    cards: int,
    ended: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run the parts; each outcome is written to PART.json in the folder and passed to `ended` at once.

    What the ranks of a part print stays in PART-RANK.log beside it, unless the part is done; what they print
    when the part runs again, in PART-again-RANK.log.

    device: the hardware's name in the outcomes.  cards: how many GPUs there are.
    """
    until_s = time.monotonic() + budget_s
    machine = MachineRecord.here()
    outcomes = []
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = link_tree(Path(scratch) / "tree")
        for i, part in enumerate(parts):
            share = part.weight / sum(p.weight for p in parts[i:])
            runs = _Runs(
                part=_fitted(part, cards),
                command=command,
                folder=folder,
                scratch=Path(scratch) / part.name,
                tree=tree,
            )
            runs.scratch.mkdir()
            for log in folder.glob(f"{part.name}-again-*.log"):
                log.unlink()
            began_s = time.monotonic()
            tried = runs.tried(cards, until_s, share)
            outcome = Outcome(
                part=part.name,
                state=tried.state,
                reason=tried.reason,
                again=tried.again,
                elapsed_s=round(time.monotonic() - began_s, 1),
                limit_s=round((until_s - began_s) * share, 1),
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                device=device,
                machine=machine,
                printed=tried.lines,
                found=read_found(runs.scratch / "found.json"),
            )
            write_outcome(folder / f"{part.name}.json", outcome)
            for more in runs.scratch.glob("*.gz"):
                shutil.copy(more, folder / more.name)
            outcomes.append(outcome)
            ended(outcome)
    return outcomes


def _fitted(part: GpuPart, cards: int) -> GpuPart:
    """A part for several GPUs has a rank on each of them, and as many ranks on one node as on the other."""
    return part if part.cards == 1 else replace(part, ranks=min(part.ranks, cards // 2 * 2))


@dataclass(frozen=True, slots=True)
class _Tried:
    """How a part ended, why if it is not done, how its second run ended, what the first printed last."""

    state: Ending
    reason: str
    again: str = ""
    lines: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """What the runs of one part have in common.  scratch: for what its processes write."""

    part: GpuPart
    command: Command
    folder: Path
    scratch: Path
    tree: Path

    def tried(self, cards: int, until_s: float, share: float) -> _Tried:
        """Run the part, and again the plain way if that may tell more, each in a share of the time left.

        A part that needs more than `cards` GPUs does not run.
        """
        if cards < self.part.cards:
            reason = f"it needs {self.part.cards} GPUs, and this machine has {cards}"
            return _Tried(Ending.NOT_RUN, reason)
        state, reason, lines = self.run((until_s - time.monotonic()) * share)
        again, left_s = "", (until_s - time.monotonic()) * share
        is_bad = state in (Ending.FAILED, Ending.TIMEOUT)
        if is_bad and self.part.tries_again and left_s >= _LEAST_AGAIN_S:
            ending, told, _ = self.run(left_s, is_plain=True)
            again = f"{ending.value}{told and ': '}{told}"
        return _Tried(state, reason, again, lines)

    def run(self, limit_s: float, *, is_plain: bool = False) -> tuple[Ending, str, list[str]]:
        """Run the part; returns how it ended, a sentence if it is not done, and its last lines."""
        part, name = self.part, self.part.name
        if is_plain:
            part, name = replace(part, environment={**part.environment, **PLAIN}), f"{name}-again"
        file = self.scratch / ("again.json" if is_plain else "found.json")
        logs = [self.folder / f"{name}-{rank}.log" for rank in range(part.ranks)]
        command = self.command(part, file, limit_s * _OWN_SHARE, is_plain)
        result = _run(part, command, limit_s, logs, self.tree)
        state, reason = _told(result, limit_s)
        if state is Ending.DONE:
            for log in logs:
                log.unlink()
        return state, reason, result.lines


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
                processes[rank].send_signal(FLIGHTS)
                processes[rank].send_signal(STACKS)
            time.sleep(_STACKS_S)
    worst = (bad or running or [0])[0]
    lines, code = _lines(logs[worst]), codes[worst]
    # C++ frames may follow an error, more than are kept.
    raised = [line for line in lines if _RAISED.match(line)]
    told = "its last line: " + (raised or lines or ["it printed nothing"])[-1]
    # If a process is late or a signal ended it (a fault in C++), its place says most.
    if (code is None or code < 0) and (place := stuck_at(lines)):
        told = f"{place}; {told}" if raised else place
    return _Ended(code=code, told=told, lines=lines[-_KEPT_LINES:])


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
    found = {**os.environ, **_EVERY_PART, "PYTHONPATH": str(tree), "PYTHONUNBUFFERED": "1"}
    if part.cards == 1:
        found[_VISIBLE] = os.environ.get(_VISIBLE, "0").split(",")[0]
    found |= part.environment
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
    if result.code is None:
        return Ending.TIMEOUT, f"it was ended after {limit_s:.0f} s; {result.told}"
    if result.code == 0:
        return Ending.DONE, ""
    if result.code == EXIT_NOT_RUN:
        return Ending.NOT_RUN, result.lines[-1]
    if result.code < 0:
        names = {found.value: found.name for found in signal.Signals}
        name = names.get(-result.code, f"signal {-result.code}")
        return Ending.FAILED, f"{name} ended it; {result.told}"
    return Ending.FAILED, f"it failed with exit status {result.code}; {result.told}"


def stuck_at(lines: Sequence[str]) -> str:
    """Read the innermost calls of the main thread, which faulthandler prints last; empty without any."""
    starts = [i for i, line in enumerate(lines) if line.endswith("(most recent call first):")]
    calls = [_FRAME.match(line) for line in lines[starts[-1] + 1 :]] if starts else []
    shown = [f"{call['function']} ({call['file']}:{call['line']})" for call in calls if call]
    return f"its main thread was in {', in '.join(shown[:_SHOWN_CALLS])}" if shown else ""


def _lines(log: Path) -> list[str]:
    """Return the lines of a log that are not empty, without torch's prefixes."""
    lines = log.read_text(errors="replace").splitlines()
    told = [re.sub(r"^\[rank\d+\]:\s?", "", line).rstrip() for line in lines]
    return [line for line in told if line and not line.startswith("USDT:")]
