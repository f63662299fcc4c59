"""The measurements of the examples: numbers agreed among the ranks, a record per phase, the final tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh

MIB = 1 << 20
LOSS_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process's rank among all, its mesh (None for a single process), and its device."""

    rank: int
    world_size: int
    nodes: int
    mesh: DeviceMesh | None
    device: torch.device

    @staticmethod
    def find(mesh: DeviceMesh | None, device: torch.device) -> Place:
        """Find the place of this process in the mesh."""
        if mesh is None:
            return Place(rank=0, world_size=1, nodes=1, mesh=None, device=device)
        return Place(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            nodes=mesh["inter"].size(),
            mesh=mesh,
            device=device,
        )

    def average(self, value: float) -> float:
        """Average a number over the ranks."""
        return self._sum(torch.tensor([value], dtype=torch.float64)).item() / self.world_size

    def all_agree(self, value: bool) -> bool:
        """Whether a value is true on every rank."""
        return self.average(float(value)) == 1.0

    def per_node(self, sent_bytes: Sequence[int]) -> list[float]:
        """Turn the bytes sent by each rank into bytes sent by a node, the mean over nodes."""
        total = self._sum(torch.tensor(sent_bytes, dtype=torch.int64))
        return [value / self.nodes for value in total.tolist()]

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        if self.mesh is not None:
            values = values.to(self._wire_device())
            dist.all_reduce(values)
        return values

    def _wire_device(self) -> torch.device:
        # Gloo sums CPU tensors even if the model is on a GPU; NCCL takes only tensors of its GPU.
        return self.device if "cuda:nccl" in dist.get_backend_config() else torch.device("cpu")


def local_device() -> torch.device:
    """Select this process's GPU and make it the current one; return the CPU if there is no GPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The results of one training run.

    losses: mean over the ranks, one a step.
    sent_bytes: between nodes, sent per node, one a step.
    parameter_bytes, trainable_bytes: of the whole model, before sharding.
    """

    name: str
    losses: list[float]
    sent_bytes: list[float]
    parameter_bytes: int
    trainable_bytes: int
    tokens_per_s: float

    def zero3_step_bytes(self, nodes: int) -> float:
        """Return the bytes that a node sends to the others in one step of ZeRO-3.

        ZeRO-3 gathers all parameters in forward and again in backward, frozen or not, and reduces the
        gradients of the trainable ones: (2 W + W_trainable) (N-1)/N.  Source: ZeRO (Rajbhandari et al.,
        2020), section 7.2.
        """
        return (2 * self.parameter_bytes + self.trainable_bytes) * (nodes - 1) / nodes


def report(phases: Sequence[Phase], *, nodes: int, strategy: str) -> str:
    """Format the phases as two tables: how training went, and the bytes between the nodes."""
    training = tabulate(
        [_training_row(phase) for phase in phases],
        headers=(
            "phase",
            "parameters\nMiB",
            "trainable\nMiB",
            "steps",
            f"loss, first {LOSS_STEPS}\nsteps",
            f"loss, last {LOSS_STEPS}\nsteps",
            "tokens/s",
        ),
        floatfmt=("", ".2f", ".2f", "", ".3f", ".3f", ",.0f"),
        colalign=("left", *["right"] * 6),
        missingval="",
    )
    if nodes == 1:
        return f"\n{training}\n\nThere is one node, so nothing crossed between nodes.\n"
    rows = [_traffic_row(phase, nodes) for phase in phases]
    if len(phases) > 1:
        sent_mib, zero3_mib = (sum(row[column] for row in rows) for column in (5, 6))
        rows.append(["all", None, None, None, None, sent_mib, zero3_mib])
    traffic = tabulate(
        rows,
        headers=(
            "phase",
            "this run\nstep 1",
            "this run\nsteady step",
            "ZeRO-3\nany step",
            "ZeRO-3 /\nsteady",
            "this run\nall steps",
            "ZeRO-3\nall steps",
        ),
        floatfmt=("", ".3f", ".3f", ".3f", ".1f", ".2f", ".2f"),
        colalign=("left", *["right"] * 6),
        missingval="",
    )
    title = f"MiB sent from node to node, per node ({nodes} nodes, strategy {strategy})"
    return f"\n{training}\n\n{title}\n\n{traffic}\n"


def _training_row(phase: Phase) -> list[Any]:
    return [
        phase.name,
        phase.parameter_bytes / MIB,
        phase.trainable_bytes / MIB,
        len(phase.losses),
        mean(phase.losses[:LOSS_STEPS]),
        mean(phase.losses[-LOSS_STEPS:]),
        phase.tokens_per_s or None,  # one step only compiles
    ]


def _traffic_row(phase: Phase, nodes: int) -> list[Any]:
    first, steady = phase.sent_bytes[0], phase.sent_bytes[-1]
    zero3_step = phase.zero3_step_bytes(nodes)
    has_steady = len(phase.sent_bytes) > 1
    return [
        phase.name,
        first / MIB,
        steady / MIB if has_steady else None,
        zero3_step / MIB,
        zero3_step / steady if has_steady and steady else None,
        sum(phase.sent_bytes) / MIB,
        zero3_step * len(phase.sent_bytes) / MIB,
    ]
