"""Train a small model for thousands of steps and print the process's memory, threads and files over time.

    python -m benchmarks.soak                                2 ranks as 2 nodes, fcdp, 3,000 steps
    python -m benchmarks.soak --system fsdp2                 the same loop with FSDP2
    python -m benchmarks.soak --steps 400 --every 50

None of them may keep growing.  Full fine-tuning with AdamW on batches of changing lengths, with an evaluation
and a save every `--save-every` steps; synchronous and asynchronous saves take turns.  The table shows rank 0.
`after trim`: after `malloc_trim` has given back the memory that the C library keeps for later use.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fcdp_compile
from benchmarks.launch import on_ranks
from fcdp_compile.core.sharding.shard import state_of

RANKS = 2
LENGTHS = (8, 12, 16, 24, 16, 8, 20)
VOCABULARY, WIDTH, LAYERS, BATCH = 128, 64, 2, 2
MIB = 1 << 20
HEADERS = ("step", "loss", "RSS\nMiB", "after trim\nMiB", "threads", "files", "slabs\nMiB", "s")


class ResidualNet(nn.Module):
    """Embedding, residual layers, head; the forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def main() -> None:
    """Start the ranks, or run as a rank."""
    parser = argparse.ArgumentParser(description="Thousands of steps: does anything grow?")
    parser.add_argument("--steps", type=int, default=3000, help="(%(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps between rows (%(default)s)")
    parser.add_argument(
        "--save-every", type=int, default=50, help="steps between saves; 0 for none (%(default)s)"
    )
    parser.add_argument("--system", choices=("fcdp", "fsdp2"), default="fcdp", help="(%(default)s)")
    args = parser.parse_args()
    if "RANK" in os.environ:
        soak(args)
        return
    sys.exit(on_ranks(RANKS, "-m", "benchmarks.soak", *sys.argv[1:]))


def soak(args: argparse.Namespace) -> None:
    """Train and print a table."""
    torch.manual_seed(0)
    net = ResidualNet()
    forward, save = (_fcdp if args.system == "fcdp" else _fsdp2)(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    rank, rows, began_s = dist.get_rank(), [], time.perf_counter()
    with tempfile.TemporaryDirectory() as mine:
        folders, wait = [mine], _nothing
        dist.broadcast_object_list(folders, src=0)
        for step in range(1, args.steps + 1):
            loss = forward(_batch(step, rank))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if args.save_every and step % args.save_every == 0:
                net.eval()
                with torch.no_grad():
                    forward(_batch(0, rank))
                net.train()
                wait = save(Path(folders[0]), optimizer, step, step // args.save_every % 2 == 1)
            if step % args.every == 0:
                seconds = time.perf_counter() - began_s
                rows.append((step, loss.item(), *_held(net, args.system), seconds))
        wait()
        dist.barrier()
    if rank == 0:
        print(
            tabulate(
                rows, headers=HEADERS, floatfmt=("", ".4f", ".1f", ".1f", "", "", ".2f", ".0f")
            )
        )
    dist.destroy_process_group()


Wait = Callable[[], None]
Save = Callable[[Path, torch.optim.Optimizer, int, bool], Wait]


def _fcdp(net: nn.Module) -> tuple[Any, Save]:
    fcdp_compile.shard(net, fcdp_compile.make_mesh(nodes=RANKS))

    def save(folder: Path, optimizer: torch.optim.Optimizer, step: int, later: bool) -> Wait:
        return fcdp_compile.save(
            folder / "saved", model=net, optimizer=optimizer, step=step, asynchronous=later
        ).wait

    return torch.compile(net, backend="fcdp"), save


def _fsdp2(net: ResidualNet) -> tuple[Any, Save]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)

    def save(folder: Path, optimizer: torch.optim.Optimizer, step: int, later: bool) -> Wait:
        model, moments = get_state_dict(net, optimizer)
        dcp.save({"model": model, "optimizer": moments}, checkpoint_id=folder / "saved")
        return _nothing

    return net, save


def _nothing() -> None:
    """Return at once: nothing is being written."""


def _batch(step: int, rank: int) -> Tensor:
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTHS[step % len(LENGTHS)]), generator=drawn)


def _held(net: nn.Module, system: str) -> tuple[float, float, int, int, float]:
    """Return memory before and after the trim, threads, open files, and MiB of pinned or shared slabs."""
    gc.collect()
    before = _rss_mib()
    ctypes.CDLL(None).malloc_trim(0)
    slabs = state_of(net).pool.slab_bytes / MIB if system == "fcdp" else 0.0
    return (
        before,
        _rss_mib(),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        slabs,
    )


def _rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


if __name__ == "__main__":
    main()
