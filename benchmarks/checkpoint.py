"""How long a save takes, and how long training waits for it: synchronous, and beside training.

    python -m benchmarks.checkpoint --mib 256                                one process
    torchrun --nproc-per-node 2 -m benchmarks.checkpoint --mib 256           two processes, as one node

The model has linear layers; with AdamW's moments it takes three times the parameters' bytes.  `stall` is how
long `save` stops training.  `write` is the time from the end of the stall until the checkpoint is in the
folder; training goes on meanwhile.  For comparison one file of as many bytes is written and synced in one go.
`of it CPU` is the stall's CPU time in the training thread; the rest is waiting for a busy core.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

import fcdp_compile

_WIDTH = 1024


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description="Saves, and how long training waits for them.")
    parser.add_argument("--mib", type=int, default=256, help="of parameters, in fp32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="where checkpoints go; by default a temporary one"
    )
    arguments = parser.parse_args()
    mesh = fcdp_compile.make_mesh()
    rank = dist.get_rank() if mesh else 0
    folder = arguments.folder or Path(tempfile.gettempdir()) / f"checkpoint-{os.getppid()}"
    try:
        rows = _measure(mesh, arguments.mib, arguments.rounds, folder)
    finally:
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank == 0:
        heads = ["", "stall [s]", "of it CPU [s]", "write [s]", "stall / write", "GB/s"]
        print(f"{3 * arguments.mib} MiB, {dist.get_world_size() if mesh else 1} ranks, medians")
        print(tabulate(rows, heads, floatfmt=".3f", tablefmt="github"))
    if mesh:
        dist.destroy_process_group()


def _measure(
    mesh: torch.distributed.device_mesh.DeviceMesh | None, mib: int, rounds: int, folder: Path
) -> list[list[object]]:
    layers = max(1, mib * 2**20 // (4 * _WIDTH * _WIDTH))
    model = fcdp_compile.shard(
        nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers))), mesh
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.rand(1, _WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    size_bytes = 3 * layers * _WIDTH * _WIDTH * 4
    stalls: list[float] = []
    cpu: list[float] = []
    writes: list[float] = []
    synchronous: list[float] = []
    loads: list[float] = []
    raw: list[float] = []
    for _ in range(rounds):
        raw.append(_timed(lambda: _write_raw(folder, size_bytes)))
        synchronous.append(
            _timed(lambda: fcdp_compile.save(folder, model=model, optimizer=optimizer))
        )
        start, busy = time.perf_counter(), time.thread_time()
        pending = fcdp_compile.save(folder, model=model, optimizer=optimizer, asynchronous=True)
        stalls.append(time.perf_counter() - start)
        cpu.append(time.thread_time() - busy)
        while not pending.done:
            step()
        pending.wait()
        writes.append(time.perf_counter() - start - stalls[-1])
        loads.append(_timed(lambda: fcdp_compile.load(folder, model=model, optimizer=optimizer)))
    stall, write = statistics.median(stalls), statistics.median(writes)

    def row(name: str, times: list[float]) -> list[object]:
        median = statistics.median(times)
        return [name, median, None, None, None, size_bytes / median / 1e9]

    share = f"{100 * stall / write:.1f} %"
    return [
        row("one file, synced", raw),
        row("save", synchronous),
        [
            "save, asynchronous",
            stall,
            statistics.median(cpu),
            write,
            share,
            size_bytes / write / 1e9,
        ],
        row("load", loads),
    ]


def _timed(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _write_raw(folder: Path, size_bytes: int) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / f"raw-{os.getpid()}"
    share = size_bytes // (dist.get_world_size() if dist.is_initialized() else 1)
    data = memoryview(bytes(2**24))
    with path.open("wb", buffering=0) as file:
        for _ in range(share // len(data)):
            file.write(data)
        os.fsync(file.fileno())
    path.unlink()


if __name__ == "__main__":
    main()
