"""Run a function on several ranks: forked from a server that has torch imported, killed when late."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from tests.device.choice import (
    issued,
    issued_in_other_orders,
    on_test_device,
    prepare_test_device,
)

_PRELOAD = ["tests.distributed.preload"]
TIMEOUT_S = 900.0
"""Only hangs take so long, even on a machine with ten times its load."""

REST_TIMEOUT_S = 60.0
"""How long the other ranks have to report after one rank has failed."""


class RankError(AssertionError):
    """At least one rank raised; the message holds every rank's traceback."""


def run(
    function: Callable[..., Any],
    *args: Any,
    nodes: int,
    ranks_per_node: int,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Call `function(mesh, *args)` on every rank and return the result of each (picklable).

    Function and arguments must be picklable: module-level functions.  Each rank is a fresh process with one
    thread, a gloo group and a mesh of nodes x ranks_per_node; all are killed if one fails or is late.  On the
    simulated device, ranks must issue the collectives of their common groups in one order.
    """
    processes, pipes = start(function, *args, nodes=nodes, ranks_per_node=ranks_per_node)
    try:
        results, errors, late = _collect(pipes, timeout_s)
        for rank in late:
            _ask_where(processes[rank])
            errors[rank] = "did not answer in time; where it was is on stderr"
        if errors:
            raise RankError(
                "\n".join(f"--- rank {r}\n{text}" for r, text in sorted(errors.items()))
            )
        if disorder := issued_in_other_orders([pipe.recv() for pipe in pipes]):
            raise RankError(f"ranks issue collectives in different orders: {disorder}")
        return [results[rank] for rank in range(nodes * ranks_per_node)]
    finally:
        kill(processes)


def start(
    function: Callable[..., Any],
    *args: Any,
    nodes: int,
    ranks_per_node: int,
    wait_s: float | None = None,
) -> tuple[list[BaseProcess], list[Connection]]:
    """Start the ranks of `run`; each sends one pair: whether it raised, and its traceback or its result.

    wait_s: how long the ranks wait for each other.
    """
    prepare_test_device()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = nodes * ranks_per_node
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe()
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank % ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            # The server may be older than a test's own settings.
            **{name: value for name, value in os.environ.items() if name.startswith("FCDP_")},
        }
        process = context.Process(
            target=_rank, args=(theirs, environment, nodes, wait_s, function, args), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return processes, pipes


def kill(processes: list[BaseProcess]) -> None:
    """Kill the ranks."""
    for process in processes:
        process.kill()
        process.join(10)


def _collect(
    pipes: list[Connection], timeout_s: float
) -> tuple[dict[int, Any], dict[int, str], list[int]]:
    """Return the results by rank, the tracebacks by rank, and the ranks that did not answer in time."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes:
        ready = wait(list(open_pipes), timeout=REST_TIMEOUT_S if errors else timeout_s)
        if not ready:
            break
        for pipe in cast(list[Connection], ready):  # `wait` is typed for other objects, too
            rank = open_pipes.pop(pipe)
            try:
                is_error, value = pipe.recv()
            except EOFError:
                is_error, value = True, "died without a word"
            (errors if is_error else results)[rank] = value
    return results, errors, sorted(open_pipes.values())


def _ask_where(process: BaseProcess) -> None:
    """Let a rank write the stacks of its threads to stderr, which pytest shows when the test fails."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)  # one after the other, so that they do not mix


def _rank(
    pipe: Connection,
    environment: dict[str, str],
    nodes: int,
    wait_s: float | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # A server that cannot import a module goes on without it, and each rank imports everything by itself.
    assert sys.modules.keys() >= set(_PRELOAD), f"ranks' server could not import {_PRELOAD}"
    for name in [n for n in os.environ if n.startswith("FCDP_") and n not in environment]:
        del os.environ[name]  # of the test that started the server
    os.environ.update(environment)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    try:
        with on_test_device(wait_s):
            mesh: DeviceMesh | None = fcdp_compile.make_mesh(nodes=nodes, timeout=wait_s)
            pipe.send((False, function(mesh, *args)))
            pipe.send(issued())
    except BaseException:
        pipe.send((True, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
