"""Train one system on this rank and measure it; started by torchrun on nodes of `benchmarks.cluster`.

    worker.py JOB.json ROWS.json

Rank 0 writes the rows.  The order is fixed: time the compute alone, take the memory's baseline, build the
system, take the check steps of every accumulation, then the timed steps, one on each network in turn.
"""

from __future__ import annotations

import gc
import importlib
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reporting.rows import ResultRow, write_records
from benchmarks.running import memory, network
from benchmarks.running.job import BenchmarkJob
from benchmarks.running.network import NETWORKS
from benchmarks.systems.model import make_batch
from benchmarks.systems.names import BY_NAME, MODEL_MODULES
from benchmarks.systems.train_torch import make_compute_trainer
from benchmarks.systems.trainer import RankOfNodes, SystemTrainer


class Rank:
    """This rank's part of a job."""

    def __init__(self, job: BenchmarkJob) -> None:
        self.job = job
        dist.init_process_group("gloo")
        # A group apart, so that the benchmark's own barriers and sums do not use the systems' groups.
        self.control = dist.new_group(backend="gloo")
        self.place = RankOfNodes(
            rank=dist.get_rank(), nodes=job.nodes, ranks_per_node=job.ranks_per_node
        )
        self.is_first_of_node = self.place.rank % job.ranks_per_node == 0
        self.trainer: SystemTrainer
        _load_compiler()
        build = _function("make_trainer", f"benchmarks.systems.{BY_NAME[job.system].family}")
        self.make_model = _function("make_model", MODEL_MODULES[job.mode])
        self.compute_s = self.measure_compute()
        del self.trainer
        gc.collect()
        self.baseline_bytes = memory.heap_bytes()
        model = self.make_model(job.shape, job.mode)
        self.all_bytes = sum(p.nbytes for p in model.parameters())
        self.trained_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self.trainer = build(job.system, model, self.place)
        self.peaks: dict[int, int] = {}

    def measure_compute(self) -> float:
        """Return the seconds of a step without communication, the least of three; the first warms up."""
        model = self.make_model(self.job.shape, self.job.mode)
        self.trainer = make_compute_trainer(model, self.place)
        return min(self.train(1)[0] for _ in range(3))

    def run(self) -> list[ResultRow]:
        """Do the job; returns the rows, which are equal on every rank."""
        before = self.sent()
        self.first_step_s, first_loss = self.train(1)
        self.first_sent_bytes = [b - a for a, b in zip(before, self.sent(), strict=True)]
        losses = [first_loss]
        check_losses: dict[int, list[float]] = {}
        for accumulation, steps in sorted(self.job.check_steps.items()):
            with memory.HeapPeak() as peak:
                # The very first step, which compiles, was taken above: its memory is not training's.
                for _ in range(steps - (accumulation == 1)):
                    losses.append(self.train(accumulation)[1])
            self.peaks[accumulation] = peak.bytes
            check_losses[accumulation] = list(losses)
        rows = []
        for accumulation in sorted({timed.accumulation for timed in self.job.timed}):
            rows += self.measure(accumulation, check_losses[accumulation])
        return rows

    def measure(self, accumulation: int, check_losses: list[float]) -> list[ResultRow]:
        """Time the steps of one accumulation, one on each network in turn."""
        wanted = {t.network: t.steps for t in self.job.timed if t.accumulation == accumulation}
        step_s: dict[str, list[float]] = {name: [] for name in wanted}
        sent: dict[str, list[list[int]]] = {name: [] for name in wanted}
        losses: dict[str, list[float]] = {name: [] for name in wanted}
        for turn in range(max(wanted.values())):
            for name in [n for n, steps in wanted.items() if turn < steps]:
                if self.is_first_of_node:
                    network.cap(NETWORKS[name])
                before = self.sent()
                seconds, loss = self.train(accumulation)
                sent[name].append([b - a for a, b in zip(before, self.sent(), strict=True)])
                step_s[name].append(seconds)
                losses[name].append(loss)
                if self.is_first_of_node:
                    network.cap(NETWORKS["unlimited"])
        host = self.trainer.host_memory()
        heap_bytes = self.peaks[accumulation] - self.baseline_bytes - host.heap_bytes
        heaps = self.gather(heap_bytes)
        hosts = self.gather(host.heap_bytes + host.mapped_bytes)
        return [
            ResultRow(
                system=self.job.system,
                mode=self.job.mode,
                accumulation=accumulation,
                network=name,
                round=self.job.round,
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                step_s=step_s[name],
                sent_bytes=sent[name],
                check_losses=check_losses,
                step_losses=losses[name],
                first_step_s=self.first_step_s,
                first_sent_bytes=self.first_sent_bytes,
                compute_s=self.compute_s,
                heap_bytes=heaps,
                host_bytes=hosts,
                all_bytes=self.all_bytes,
                trained_bytes=self.trained_bytes,
            )
            for name in wanted
        ]

    def train(self, accumulation: int) -> tuple[float, float]:
        """Take one optimizer step; returns the slowest rank's seconds and the mean loss of the ranks."""
        batches = [
            make_batch(self.job.shape, rank=self.place.rank, number=i) for i in range(accumulation)
        ]
        dist.barrier(self.control)
        began = time.perf_counter()
        losses = [
            self.trainer.micro_batch(ids, is_last=i == accumulation - 1, accumulation=accumulation)
            for i, ids in enumerate(batches)
        ]
        self.trainer.step()
        seconds = time.perf_counter() - began
        loss = torch.stack(losses).mean().item()
        return max(self.gather(seconds)), sum(self.gather(loss)) / self.place.ranks

    def sent(self) -> list[int]:
        """Return the bytes that each node has sent so far; read when nothing is in flight."""
        dist.barrier(self.control)
        own = network.sent_bytes()
        return self.gather(own)[:: self.job.ranks_per_node]

    def gather(self, value: Any) -> list[Any]:
        """Gather a value of every rank."""
        values: list[Any] = [None] * self.place.ranks
        dist.all_gather_object(values, value, group=self.control)
        return values


def _function(name: str, module: str) -> Callable[..., Any]:
    # Imported by name, so that a worker imports DeepSpeed or bitsandbytes only to measure it.
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _load_compiler() -> None:
    """Load the modules that torch.compile loads at first use, lest they count as a system's memory."""
    torch.compile(lambda x: x + 1, backend="aot_eager")(torch.ones(1, requires_grad=True))
    torch.compiler.reset()


def main(job_file: Path, rows_file: Path) -> None:
    """Do the job that a file describes."""
    torch.set_num_threads(1)
    rank = Rank(BenchmarkJob.from_json(job_file.read_text(encoding="utf-8")))
    rows = rank.run()
    if rank.place.rank == 0:
        write_records(rows_file, rows)
    dist.barrier(rank.control)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
