"""A small job that trains with dropout, for tests that save and load it: model, AdamW, scheduler, data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from tests.device.choice import seeded
from tests.distributed.models import CASES
from tests.distributed.parity import compile_with, fresh, rank_and_ranks, whole


class Position:
    """A data loader's position: the number of batches so far, and this rank's order of batches."""

    def __init__(self, rank: int) -> None:
        self.given = 0
        self.order = torch.randperm(1000, generator=seeded(rank))

    def next(self) -> int:
        self.given += 1
        return int(self.order[self.given])

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.order = state["given"], state["order"]


class Noisy(nn.Module):
    """Sizes that ranks do not divide, a scalar, an empty parameter, dropout, a batch norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = CASES["odd"].model()
        self.normalised = nn.BatchNorm1d(17)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.normalised(self.dropout(self.odd(ids)).flatten(0, 1))


class Job:
    """A training job; without a mesh it runs in one process.  Each rank draws its own dropout."""

    def __init__(
        self, mesh: DeviceMesh | None, *, strategy: str = "fcdp", compiled: bool = False
    ) -> None:
        fresh()
        self.mesh = mesh
        self.rank, self.ranks = rank_and_ranks(mesh)
        torch.manual_seed(0)
        self.model = fcdp_compile.shard(Noisy(), mesh, strategy=strategy)
        self.net: Any = compile_with(self.model, "eager" if compiled else None)
        self.optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in self.model.parameters() if p.dim() > 1],
                    "weight_decay": 0.1,
                },
                {"params": [p for p in self.model.parameters() if p.dim() < 2], "lr": 3e-3},
            ],
            lr=1e-2,
        )
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)
        self.position = Position(self.rank)
        torch.manual_seed(100 + self.rank)

    def train(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def step(self) -> float:
        generator = seeded(self.position.next())
        ids = torch.randint(0, 17, (2, 8), generator=generator)
        loss = nn.functional.cross_entropy(self.net(ids), ids.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return loss.item()

    def save(self, folder: str, **options: Any) -> fcdp_compile.PendingSave:
        return fcdp_compile.save(
            folder,
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            step=self.position.given,
            extra={"data": self.position, "best": float("inf")},
            **options,
        )

    def load(self, folder: str, **options: Any) -> fcdp_compile.Loaded:
        return fcdp_compile.load(
            folder,
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            extra={"data": self.position},
            **options,
        )

    def values(self) -> dict[str, Tensor]:
        """Parameters, moments, step counts and buffers, whole."""
        found = {n: whole(p) for n, p in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key} of {name}"] = whole(value)
        return found | {n: b.clone() for n, b in self.model.named_buffers()}

    def local_values(self) -> dict[str, Tensor]:
        """The buffers of this rank."""
        return {n: b.clone() for n, b in self.model.named_buffers()}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Both must be equal, bit by bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(found[name].view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))
        assert same, f"{name} differs"
