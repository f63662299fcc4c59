"""Ranks that stay alive and run one case after another; a case that hangs or kills them costs a restart.

parent: (suite, case) ──pipe──▶ each rank: suite.run(mesh, case) ──pipe──▶ parent: Outcome of each rank
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed import ranks
from tests.peers.outcomes import Outcome, Status, joined, outcome_of

LAYOUT = 2, 2
"""Nodes, and ranks of each; a suite that is written for another number of ranks has a LAYOUT of its own."""

CASE_LIMIT_S = 240.0
"""A case that takes longer hangs: most take a second.  A suite may have a limit of its own."""
_REST_S = 15.0
"""How long other ranks have after one has failed: they may wait for it in a collective."""
_START_S = 180.0


class Suite(Protocol):
    """What a suite's module has."""

    def cases(self) -> list[str]:
        """The names of all cases, in order."""

    def run(self, mesh: DeviceMesh, case: str) -> None:
        """Run one case on this rank; raises if the numbers differ."""


def serve(mesh: DeviceMesh, pipes: list[Connection], suite: str) -> None:
    """Run the cases that the parent names, until it sends None."""
    module: Any = importlib.import_module(suite)
    pipe = pipes[dist.get_rank()]
    pipe.send(None)
    while (case := pipe.recv()) is not None:
        begin = time.perf_counter()
        try:
            module.run(mesh, case)
            outcome = Outcome(status=Status.EQUAL)
        except (Exception, SystemExit) as error:
            outcome = outcome_of(error)
        except BaseException as error:  # pytest's own outcomes are no Exceptions
            if type(error).__module__ != "_pytest.outcomes":
                raise
            outcome = outcome_of(error)
        torch._dynamo.reset()
        gc.collect()
        seconds = round(time.perf_counter() - begin, 1)
        pipe.send(Outcome(status=outcome.status, text=outcome.text, seconds=seconds))


class _Ranks:
    """The processes, and a pipe to each."""

    def __init__(self, suite: str) -> None:
        module = importlib.import_module(suite)
        self._limit_s = getattr(module, "CASE_LIMIT_S", CASE_LIMIT_S)
        nodes, ranks_per_node = getattr(module, "LAYOUT", LAYOUT)
        pairs = [Pipe() for _ in range(nodes * ranks_per_node)]
        self.pipes = [ours for ours, _ in pairs]
        self.processes, self._ends = ranks.start(
            serve,
            [theirs for _, theirs in pairs],
            suite,
            nodes=nodes,
            ranks_per_node=ranks_per_node,
        )
        found = self._answers(_START_S, _START_S)
        if any(isinstance(one, str) for one in found):
            self.kill()
            raise RuntimeError(f"the ranks of {suite} did not start: {found}")

    def run(self, case: str) -> list[Outcome | str]:
        """The outcome of each rank, or why it has none."""
        for pipe in self.pipes:
            pipe.send(case)
        return self._answers(self._limit_s, _REST_S)

    def kill(self) -> None:
        ranks.kill(self.processes)

    def _answers(self, limit_s: float, rest_s: float) -> list[Any]:
        found: dict[int, Any] = {}
        by_pipe = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        by_end = {end: rank for rank, end in enumerate(self._ends)}
        until = time.monotonic() + limit_s
        while len(found) < len(self.pipes):
            ready = wait([*by_pipe, *by_end], timeout=max(0.0, until - time.monotonic()))
            if not ready:
                break
            for one in ready:
                if one in by_pipe:
                    rank = by_pipe.pop(one)
                    found[rank] = one.recv()
                else:
                    rank = by_end.pop(one)
                    found.setdefault(rank, "the process died")
            if any(
                isinstance(o, str) or (o and o.status is not Status.EQUAL) for o in found.values()
            ):
                until = min(until, time.monotonic() + rest_s)
        return [found.get(rank, "no answer in time") for rank in range(len(self.pipes))]


def outcomes(suite: str, cases: Iterable[str]) -> Iterator[tuple[str, Outcome]]:
    """Run cases of a suite, each with its outcome; the ranks start anew after ranks disagreed."""
    running: _Ranks | None = None
    try:
        for case in cases:
            running = running or _Ranks(suite)
            found = running.run(case)
            outcome = _of_all(found)
            # fcdp refuses before any collective.  After a failure ranks may be apart, whatever they say.
            if outcome.status is Status.FAILED:
                running.kill()
                running = None
            yield case, outcome
    finally:
        if running is not None:
            running.kill()


def _of_all(found: list[Outcome | str]) -> Outcome:
    answers = [one for one in found if isinstance(one, Outcome)]
    if len(answers) == len(found):
        return joined(answers)
    failed = [one.text for one in answers if one.status is not Status.EQUAL]
    silent = sorted({one for one in found if isinstance(one, str)})
    return Outcome(status=Status.FAILED, text="; ".join([*silent, *failed])[:400])
