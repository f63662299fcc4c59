from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fcdp_compile
from tests.distributed.models import CASES, batch
from tests.distributed.ranks import run

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _train(mesh: DeviceMesh, name: str) -> list[float]:
    case = CASES[name]
    torch.manual_seed(0)
    model = fcdp_compile.shard(case.model(), mesh)
    net = torch.compile(model, backend="fcdp", options={"bucket_mb": 0.05})
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, device = [], torch.get_default_device()
    for step in range(3):
        ids = batch(case, step=step, rank=torch.distributed.get_rank())
        # A user may be building another model, so fcdp names the device of each tensor that it makes.
        torch.set_default_device("meta" if step != 1 else device)
        try:
            loss = case.loss(net, ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.set_default_device(device)
        losses.append(loss.item())
    return losses


def test_a_model_trains_on_two_nodes() -> None:
    results = run(_train, "odd", nodes=2, ranks_per_node=2)
    assert len(results) == 4
    assert all(len(losses) == 3 for losses in results)
    assert copy.deepcopy(results[0]) != results[1], "ranks train on data of their own"
