"""A small job in one process, quick enough to be saved and loaded some hundred times."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fcdp_compile
from fcdp_compile.models.checkpointing.contents import JobObjects as Given
from fcdp_compile.models.checkpointing.format.disk import Disk
from fcdp_compile.models.checkpointing.saving import save_on


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.norm(self.first(inputs)) * self.scale
        return out


class Small:
    def __init__(self, seed: int = 0, *, width: int = 5) -> None:
        torch.manual_seed(seed)
        self.model = fcdp_compile.shard(Net(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.extra: dict[str, Any] = {"best": 1.5, "seen": (seed, torch.tensor([seed]))}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            inputs = torch.rand(4, 3) * random.random() * np.random.rand()
            self.model(inputs.float()).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def save(self, folder: Path, *, disk: Disk | None = None, step: int = 1) -> None:
        given = Given(
            optimizer=self.optimizer, scheduler=self.scheduler, scaler=None, extra=self.extra
        )
        save_on(disk or Disk(), folder, self.model, given, step)

    def load(self, folder: Path) -> fcdp_compile.Loaded:
        return fcdp_compile.load(
            folder, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler
        )

    def state(self) -> dict[str, Any]:
        """Everything that a load may change, as text that differs if any bit does."""
        tensors = {n: t.detach() for n, t in self.model.state_dict().items()}
        for i, of_one in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{i} {key}": value for key, value in of_one.items()}
        return {
            "tensors": {n: t.view(-1).tolist() for n, t in tensors.items()},
            "groups": repr(self.optimizer.state_dict()["param_groups"]),
            "scheduler": repr(self.scheduler.state_dict()),
            "rng": (torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),
        }


class Watched(Disk):
    """Records each point of a save, and kills the process at the point with a given number."""

    def __init__(self, kill_at: int = -1) -> None:
        self.points: list[str] = []
        self._kill_at = kill_at

    def reached(self, point: str) -> None:
        if len(self.points) == self._kill_at:
            os._exit(9)
        self.points.append(point)


def data_file(folder: Path) -> Path:
    """The only file of a checkpoint's data."""
    (found,) = folder.glob("data-*/rank-00000.safetensors")
    return found
