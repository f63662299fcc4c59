"""A loop of Lightning Fabric with FcdpStrategy trains like the same loop with DDPStrategy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import fcdp_compile
from fcdp_compile.errors import CheckpointError, FcdpError
from fcdp_compile.integrations.fabric import FcdpOptions, FcdpStrategy
from tests.distributed.ranks import run

distributed = pytest.mark.distributed


class _Run(NamedTuple):
    fabric: Fabric
    model: Any
    optimizer: Any
    scheduler: Any
    losses: list[float]
    norms: list[Tensor]
    rows: list[int]


def _fabric(strategy: DDPStrategy, precision: Any = "32-true") -> Fabric:
    # As torchrun starts two machines with one process each.
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": os.environ["RANK"]}
    fabric = Fabric(
        accelerator="cpu", devices=1, num_nodes=2, strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 4))


def _train(strategy: DDPStrategy, precision: str = "32-true", *, jointly: bool = True) -> _Run:
    """Four micro-batches, two steps; the learning rate halves after the first step."""
    torch._dynamo.reset()
    fabric, model = _fabric(strategy, precision), _model()
    net: Any
    optimizer: Any
    if jointly:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        net, optimizer = fabric.setup(model, optimizer)
    else:
        net = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.rand(32, 8, generator=generator), torch.arange(32))
    done = _Run(fabric, net, optimizer, scheduler, [], [], [])
    for i, (inputs, rows) in enumerate(
        fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    ):
        is_last = i % 2 == 1
        with fabric.no_backward_sync(net, enabled=not is_last):
            loss = net(inputs).square().mean()
            fabric.backward(loss)
        done.losses.append(loss.item())
        done.rows.extend(rows.tolist())
        if is_last:
            norm = fabric.clip_gradients(net, optimizer, max_norm=0.1)
            assert norm is not None
            done.norms.append(norm)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return done


def _whole(model: Any) -> list[Tensor]:
    found = (p.detach() for p in model.parameters())
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in found]


def _compare(expected: _Run, found: _Run, tolerance: float) -> None:
    assert found.rows == expected.rows, "another part of the data"
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert not any(isinstance(norm, DTensor) for norm in found.norms)
    norms = [norm.item() for norm in found.norms]
    assert norms == pytest.approx([norm.item() for norm in expected.norms], rel=tolerance)
    assert norms[0] > 0.1, "nothing was clipped"
    for mine, other in zip(_whole(found.model), _whole(expected.model), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance / 10)


def _parity(mesh: DeviceMesh) -> None:
    # Relative; both sides add the same numbers in different orders, in fp32 and with 8 bits.
    for precision, tolerance in (("32-true", 2e-5), ("bf16-mixed", 2e-2)):
        expected = _train(DDPStrategy(), precision)
        options = {"compute": "eager"} if precision == "bf16-mixed" else {}
        found = _train(FcdpStrategy(FcdpOptions(options=options)), precision)
        _compare(expected, found, tolerance)
        assert fcdp_compile.explain(found.model).uncovered == ()
        assert fcdp_compile.traffic(found.model).steps == 2
        if precision == "32-true":
            whole = FcdpOptions(nodes=1, strategy="zero3", options={"compute": "eager"})
            _compare(expected, _train(FcdpStrategy(whole), jointly=False), tolerance)


@distributed
def test_a_loop_trains_as_with_ddp() -> None:
    run(_parity, nodes=2, ranks_per_node=1)


def _saved_and_loaded(mesh: DeviceMesh, folder: Path) -> None:
    options = {"compute": "eager"}
    saved = _train(FcdpStrategy(FcdpOptions(options=options)))
    state = {"model": saved.model, "optimizer": saved.optimizer, "scheduler": saved.scheduler}
    saved.fabric.save(folder / "last", {**state, "step": 2, "seen": [1, 2]})
    fabric = _fabric(FcdpStrategy(FcdpOptions(strategy="zero3", options=options)))
    model = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 4))
    net, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    again = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    assert fabric.load(folder / "last", again) == {"seen": [1, 2]}
    assert again["step"] == 2
    assert scheduler.state_dict() == saved.scheduler.state_dict()
    for mine, other in zip(_whole(net), _whole(saved.model), strict=True):
        assert torch.equal(mine, other)
    for a, b in zip(net.parameters(), saved.model.parameters(), strict=True):
        mine, other = (o.state[p]["exp_avg"] for o, p in ((optimizer, a), (saved.optimizer, b)))
        assert torch.equal(mine.full_tensor(), other.full_tensor())
    with pytest.raises(CheckpointError, match="has no 'epoch'; leave it out, or give strict=False"):
        fabric.load(folder / "last", {"model": net, "epoch": 0})
    assert "seen" in fabric.load(folder / "last", {"model": net, "epoch": 0}, strict=False)
    with pytest.raises(CheckpointError, match="is a folder, as FcdpStrategy saves it"):
        fabric.load(folder / "last")
    with pytest.raises(CheckpointError, match="has 'model', 'other', but a folder holds one"):
        fabric.save(folder / "two", {"model": net, "other": saved.model})
    with pytest.raises(CheckpointError, match="leave filter out"):
        fabric.save(folder / "some", {"model": net}, filter={"model": lambda name, value: True})
    fabric.save(folder / "plain", {"step": 3})  # as any strategy does
    assert fabric.load(folder / "plain") == {"step": 3}


@distributed
def test_a_checkpoint_continues_with_another_strategy(tmp_path: Path) -> None:
    run(_saved_and_loaded, tmp_path, nodes=2, ranks_per_node=1)


def _refused(mesh: DeviceMesh) -> None:
    fabric = _fabric(FcdpStrategy())
    with pytest.raises(
        ValueError, match=r"compiled before fabric\.setup.*leave torch\.compile out"
    ):
        fabric.setup(torch.compile(_model()))
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"AdamW has a state of parameter '0\.weight'"):
        fabric.setup(model, optimizer)
    assert not any(isinstance(p, DTensor) for p in model.parameters()), "sharded before the refusal"
    sharded = fcdp_compile.shard(model, mesh)
    with pytest.raises(FcdpError, match=r"do not wrap a sharded model .*use FcdpStrategy"):
        _fabric(DDPStrategy()).setup(sharded)
    fabric.setup(sharded)
    late = _fabric(FcdpStrategy(FcdpOptions(strategy="zero3")))
    with pytest.raises(ValueError, match=r"FcdpOptions\(strategy='zero3'\) comes too late"):
        late.setup(sharded)
    _from_meta()


def _from_meta() -> None:
    fabric = _fabric(FcdpStrategy(FcdpOptions(options={"compute": "eager"})))
    with torch.device("meta"):
        model = _model()
    net = fabric.setup(model)
    fcdp_compile.materialize(net)
    fabric.backward(net(torch.rand(2, 8)).sum())
    assert all(p.grad is not None for p in net.parameters())
    assert dist.get_world_size() == fabric.world_size


@distributed
def test_what_is_refused_and_what_is_not() -> None:
    run(_refused, nodes=2, ranks_per_node=1)


def test_options_of_ddp() -> None:
    with pytest.raises(ValueError, match=r"FcdpOptions\(cp=2, tp=1\) is for integrations"):
        FcdpStrategy(FcdpOptions(cp=2))
    with pytest.raises(ValueError, match="got find_unused_parameters, which DistributedData"):
        FcdpStrategy(find_unused_parameters=True)
