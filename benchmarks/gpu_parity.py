"""(d): four ranks on one device over Gloo compute what DDP computes, and move what they move on a CPU."""

from __future__ import annotations

import torch
import torch.distributed as dist

import fcdp_compile
from benchmarks.gpu_parts import Parity
from benchmarks.model import make_batch, make_model
from benchmarks.shape import Shape
from benchmarks.train_fcdp import FcdpTrainer
from benchmarks.train_torch import DdpTrainer, TorchTrainer

RANKS, NODES = 4, 2
SHAPE = Shape(layers=3, width=128, vocabulary=199, batch=2, length=32)
_STEPS = 5


def measure_parity(device: torch.device, mode: str) -> Parity:
    """Train with both; on every rank, with the same losses."""
    replicated = torch.nn.parallel.DistributedDataParallel(make_model(SHAPE, mode).to(device))
    ddp_losses = _losses(DdpTrainer(replicated, list(replicated.parameters())), device)
    mesh = fcdp_compile.make_mesh(nodes=NODES)
    sharded = fcdp_compile.shard(make_model(SHAPE, mode).to(device), mesh, strategy="fcdp")
    losses = _losses(FcdpTrainer(sharded), device)
    moved = fcdp_compile.traffic(sharded).last_step.rows
    return Parity(
        mode=mode,
        losses=losses,
        ddp_losses=ddp_losses,
        traffic={f"{link} {kind}": count for link, kind, count in moved},
    )


def _losses(trainer: TorchTrainer, device: torch.device) -> list[float]:
    losses = []
    for number in range(_STEPS):
        ids = make_batch(SHAPE, rank=dist.get_rank(), number=number).to(device)
        loss = trainer.micro_batch(ids, is_last=True, accumulation=1).cpu()
        trainer.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses
