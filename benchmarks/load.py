"""The cost of `load_pretrained` on every rank: peak memory, and bytes read of the checkpoint.

    python -m benchmarks.load                          2 GB of float32, 2 x 2 ranks
    python -m benchmarks.load --mode whole             every rank loads the whole checkpoint, for comparison

Memory counts the anonymous pages that the process gains during the load, sampled every few milliseconds.
Mapped pages of the checkpoint's files belong to the system's page cache, which can reclaim them; they are
shown apart.  Bytes read are shown twice: the bytes that the ranks of each node asked for, and the bytes that
the disk delivered, for all ranks together, as they share one page cache.  The page cache of the files is
dropped before the load.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tabulate import tabulate
from torch import nn

import fcdp_compile
from benchmarks.launch import on_ranks
from benchmarks.running.machine import MachineRecord
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.models.pretrained import load as load_module

LIMIT = 1.2  # of home shards plus the largest tensor
READ_LIMIT = 1.1  # of the file, by each node


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """The memory and the bytes read of one rank.

    mapped_bytes: the most bytes of files mapped at once, beyond those before the load.
    delivered_bytes: from the disk to this process.
    """

    node: int
    place: int
    home_bytes: int
    largest_bytes: int
    anonymous_bytes: int
    mapped_bytes: int
    requested_bytes: int
    delivered_bytes: int
    seconds: float


class Model(nn.Module):
    """A model of matrices alone."""

    def __init__(self, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)


def sizes_of(total_bytes: int) -> list[tuple[int, int]]:
    """Return shapes of float32 matrices of `total_bytes` together: an embedding, layers of three matrices."""
    width = 2048
    layer = [(width, width), (4 * width, width), (width, 4 * width)]
    layer_bytes = 4 * sum(a * b for a, b in layer)
    layers = max(1, int(0.9 * total_bytes) // layer_bytes)
    rows = max(64, (total_bytes - layers * layer_bytes) // (4 * width))
    return [(rows, width), *(size for _ in range(layers) for size in layer)]


def write(folder: Path, sizes: Sequence[tuple[int, int]], files: int) -> int:
    """Write a checkpoint in several files; returns the bytes of its tensors."""
    names = [f"weights.{i}" for i in range(len(sizes))]
    places: dict[str, str] = {}
    for k in range(files):
        mine = {
            name: torch.randn(size)
            for i, (name, size) in enumerate(zip(names, sizes, strict=True))
            if i % files == k
        }
        file = f"model-{k + 1:05d}-of-{files:05d}.safetensors"
        save_file(mine, folder / file, {"format": "pt"})
        places |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return 4 * sum(a * b for a, b in sizes)


def main() -> None:
    """Write a checkpoint, load it on ranks of this machine, and print a table."""
    parser = argparse.ArgumentParser(description="Peak memory and bytes read of load_pretrained.")
    parser.add_argument("--gb", type=float, default=2.0, help="of the checkpoint, 10**9 bytes")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--mode", choices=("load_pretrained", "whole"), default="load_pretrained")
    parser.add_argument(
        "--folder", type=Path, help="on a disk with room, default the temporary one"
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = sizes_of(int(arguments.gb * 1e9))
    if arguments.worker:
        _work(arguments.worker, sizes, arguments.nodes, arguments.mode)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        file_bytes = write(folder, sizes, arguments.files)
        ranks = arguments.nodes * arguments.ranks_per_node
        again = [f"--nodes={arguments.nodes}", f"--gb={arguments.gb}", f"--mode={arguments.mode}"]
        if code := on_ranks(ranks, "-m", "benchmarks.load", f"--worker={folder}", *again):
            sys.exit(code)
        rows = [RankCosts(**json.loads(p.read_text())) for p in sorted(folder.glob("row-*.json"))]
    print(_report(rows, file_bytes))


def _report(rows: Sequence[RankCosts], file_bytes: int) -> str:
    mb = 1e6
    table = [
        {
            "node": row.node,
            "place": row.place,
            "home shards MB": row.home_bytes / mb,
            "largest tensor MB": row.largest_bytes / mb,
            "peak MB": row.anonymous_bytes / mb,
            "of both": row.anonymous_bytes / (row.home_bytes + row.largest_bytes),
            "mapped MB": row.mapped_bytes / mb,
            "asked for MB": row.requested_bytes / mb,
            "from the device MB": row.delivered_bytes / mb,
            "s": row.seconds,
        }
        for row in rows
    ]
    nodes = sorted({row.node for row in rows})
    by_node = {n: sum(r.requested_bytes for r in rows if r.node == n) for n in nodes}
    delivered = sum(row.delivered_bytes for row in rows)
    worst = max(r.anonymous_bytes / (r.home_bytes + r.largest_bytes) for r in rows)
    lines = [
        tabulate(table, headers="keys", floatfmt=".3f"),
        f"file: {file_bytes / mb:.1f} MB",
        f"highest peak: {worst:.3f} of home shards and largest tensor (limit {LIMIT})",
        *(
            f"node {n} asked for {size / file_bytes:.3f} of the file (limit {READ_LIMIT})"
            for n, size in by_node.items()
        ),
        f"all ranks, who share one page cache, had {delivered / file_bytes:.3f} of the file from the device",
        str(MachineRecord.here()),
    ]
    return "\n".join(lines)


def _work(folder: Path, sizes: Sequence[tuple[int, int]], nodes: int, mode: str) -> None:
    """One rank: load, with a thread that samples its memory."""
    mesh = fcdp_compile.make_mesh(nodes=nodes)
    assert mesh is not None
    with torch.device("meta"):
        model = Model(sizes)
    fcdp_compile.shard(model, mesh)
    state = state_of(model)
    home = sum(record.local().nbytes for record in state.records.values())
    if mesh.get_rank() == 0:
        _drop_page_cache(folder)
    dist.barrier()
    told = Told()
    before_read = _delivered()
    with Sampling() as sampling:
        start = time.perf_counter()
        if mode == "whole":
            kept = _load_whole(folder)
            requested_bytes = sum(t.nbytes for t in kept)
        else:
            fcdp_compile.load_pretrained(model, folder)
            requested_bytes = told.read_bytes
        seconds = time.perf_counter() - start
    row = RankCosts(
        node=state.topology.node,
        place=state.topology.place,
        home_bytes=home,
        largest_bytes=max(4 * a * b for a, b in sizes),
        anonymous_bytes=sampling.anonymous_bytes,
        mapped_bytes=sampling.mapped_bytes,
        requested_bytes=requested_bytes,
        delivered_bytes=_delivered() - before_read,
        seconds=seconds,
    )
    (folder / f"row-{mesh.get_rank()}.json").write_text(json.dumps(asdict(row)))
    dist.barrier()
    dist.destroy_process_group()


def _load_whole(folder: Path) -> list[torch.Tensor]:
    return [t.clone() for f in sorted(folder.glob("*.safetensors")) for t in load_file(f).values()]


class Told(logging.Handler):
    """Takes the bytes that this rank has read from the load's log message."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.read_bytes = 0
        logger = logging.getLogger(load_module.__name__)
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        assert isinstance(record.args, tuple)
        *_, self.read_bytes = record.args  # type: ignore[assignment]  # typed as any object; bytes come last


class Sampling:
    """The peak memory of the process within a `with` block, beyond the memory before the block.

    No byte of a meta model's home shards has been written before the load, so none counts as memory before.
    """

    def __init__(self) -> None:
        self.anonymous_bytes = self.mapped_bytes = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Sampling:
        self._before = _resident()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            anonymous, mapped = _resident()
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous - self._before[0])
            self.mapped_bytes = max(self.mapped_bytes, mapped - self._before[1])
            if self._ends.wait(0.003):
                return


def _resident() -> tuple[int, int]:
    """Return the bytes of this process's anonymous pages and of its mapped file pages."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kib = {name: int(fields[name].split()[0]) for name in ("RssAnon", "RssFile", "RssShmem")}
    return 1024 * (kib["RssAnon"] + kib["RssShmem"]), 1024 * kib["RssFile"]


def _delivered() -> int:
    """Return the bytes that disks delivered to this process, by reads or by mapped pages."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def _drop_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


if __name__ == "__main__":
    main()
