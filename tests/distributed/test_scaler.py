"""fp16 with `torch.amp.GradScaler`: an overflow in one element on one rank skips the step on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from tests.distributed.parity import values
from tests.distributed.ranks import run

pytestmark = pytest.mark.distributed

STRATEGIES = ["fcdp", "zero3", "ddp", "mics", "fcdp+w8+g4", "mixed"]


class _Rows(nn.Module):
    """Two layers; the factors set the size of the rows of their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 8)

    def forward(self, inputs: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(inputs)).float() * factors).sum()


def _train(mesh: DeviceMesh) -> None:
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        torch._dynamo.reset()
        is_mixed = strategy == "mixed"
        model = fcdp_compile.shard(
            _Rows(),
            mesh,
            strategy="fcdp" if is_mixed else strategy,
            module_strategies={"second": "mics"} if is_mixed else None,
            param_dtype=torch.float16,
        )
        net = torch.compile(model, backend="fcdp")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for step, overflows in enumerate((False, True, False)):
            before = values(model)
            factors = torch.full((8,), 1e-3)
            if overflows and dist.get_rank() == 1:
                factors[-1] = 2.0  # times the scale, this overflows in fp16
            scaler.scale(net(torch.ones(2, 4), factors)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved = [not torch.equal(before[n], v) for n, v in values(model).items()]
            assert any(moved) != overflows, f"{strategy}, step {step}"
            assert scaler.get_scale() == 2.0 ** (15 if step else 16), f"{strategy}, step {step}"


@pytest.mark.slow
def test_all_ranks_skip_together() -> None:
    run(_train, nodes=2, ranks_per_node=2)
