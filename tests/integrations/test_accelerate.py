"""A loop of Accelerate on fcdp's Accelerator trains like the same loop on accelerate's own with DDP."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import fcdp_compile
from fcdp_compile.errors import ArgumentError
from fcdp_compile.integrations.accelerate import Accelerator
from fcdp_compile.integrations.options import FcdpOptions
from tests.distributed.parity import whole
from tests.distributed.ranks import run

distributed = pytest.mark.distributed
EAGER = FcdpOptions(options={"compute": "eager"})


class _Loop(NamedTuple):
    accelerator: Any
    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    losses: list[float]
    norms: list[Any]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 4))


def _begin(kind: Any, *, precision: str = "no", **options: Any) -> _Loop:
    """Prepare as scripts for Accelerate do: the optimizer is built from the model that is not sharded yet."""
    torch._dynamo.reset()
    AcceleratorState._reset_state()  # the mixed precision of the loop before
    GradientState._reset_state()
    set_seed(1)
    accelerator = kind(
        cpu=True, gradient_accumulation_steps=2, mixed_precision=precision, **options
    )
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.rand(40, 8, generator=generator))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    prepared = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4), scheduler)
    return _Loop(accelerator, *prepared, [], [])


def _train(loop: _Loop) -> _Loop:
    """Run an epoch: five micro-batches in three steps."""
    for (inputs,) in loop.loader:
        with loop.accelerator.accumulate(loop.model):
            loss = loop.model(inputs).square().mean()
            loop.accelerator.backward(loss)
            if loop.accelerator.sync_gradients:
                loop.norms.append(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1))
            loop.optimizer.step()
            loop.scheduler.step()
            loop.optimizer.zero_grad()
        loop.losses.append(loss.item())
    return loop


def _whole(model: Any) -> list[Tensor]:
    found = (p.detach() for p in model.parameters())
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in found]


def _compare(expected: _Loop, found: _Loop, tolerance: float) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert not any(isinstance(norm, DTensor) for norm in found.norms)
    norms = [norm.item() for norm in found.norms]
    assert norms == pytest.approx([norm.item() for norm in expected.norms], rel=tolerance)
    assert norms[0] > 0.1, "nothing was clipped"
    assert found.scheduler.get_last_lr() == expected.scheduler.get_last_lr()
    for mine, other in zip(_whole(found.model), _whole(expected.model), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance / 10)


def _parity(mesh: DeviceMesh) -> None:
    expected = _train(_begin(accelerate.Accelerator))
    assert isinstance(expected.model, nn.parallel.DistributedDataParallel)
    found = _train(_begin(Accelerator))
    # Both sides add the same numbers in different orders, in fp32 and with 8 bits.
    _compare(expected, found, 2e-5)
    assert fcdp_compile.explain(found.model).uncovered == ()
    assert fcdp_compile.traffic(found.model).steps == 3
    rounded = _train(_begin(accelerate.Accelerator, precision="bf16"))
    assert rounded.losses != expected.losses, "autocast did nothing"
    _compare(rounded, _train(_begin(Accelerator, precision="bf16", fcdp=EAGER)), 2e-2)


@distributed
def test_a_loop_trains_as_with_ddp() -> None:
    run(_parity, nodes=2, ranks_per_node=1)


def _goes_on(mesh: DeviceMesh, folder: Path) -> None:
    loop = _train(_begin(Accelerator, fcdp=EAGER))
    loop.accelerator.save_state(str(folder / "state"))
    expected = _train(loop).losses[5:]
    again = _begin(Accelerator, fcdp=EAGER)
    again.accelerator.load_state(str(folder / "state"))
    assert _train(again).losses == expected
    assert again.scheduler.get_last_lr() == loop.scheduler.get_last_lr()
    for mine, other in zip(_whole(again.model), _whole(loop.model), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(ArgumentError, match="load_state needs the folder that save_state returned"):
        again.accelerator.load_state()
    with pytest.raises(ArgumentError, match="get_state_dict would hold the whole model"):
        again.accelerator.get_state_dict(again.model)


def _late_gradients(kind: Any) -> list[Tensor]:
    """Two forwards within no_sync, and then their backwards, of which the second one synchronises."""
    loop = _begin(kind)
    inputs = torch.rand(
        2, 4, 8, generator=torch.Generator().manual_seed(loop.accelerator.process_index)
    )
    with loop.accelerator.no_sync(loop.model):
        first, second = (loop.model(x).square().mean() for x in inputs)
    loop.accelerator.backward(first)
    with loop.accelerator.trigger_sync_in_backward(loop.model):
        loop.accelerator.backward(second)
    return [whole(p.grad) for p in loop.model.parameters()]


def _triggers(mesh: DeviceMesh) -> None:
    for mine, other in zip(
        _late_gradients(Accelerator), _late_gradients(accelerate.Accelerator), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=1e-7)
    again = pickle.loads(pickle.dumps(Accelerator(cpu=True)))
    assert again.num_processes == 2


@distributed
def test_a_backward_may_synchronise_what_its_forward_would_not() -> None:
    run(_triggers, nodes=2, ranks_per_node=1)


@pytest.mark.slow
@distributed
def test_a_fresh_accelerator_goes_on_from_a_saved_state(tmp_path: Path) -> None:
    run(_goes_on, tmp_path, nodes=2, ranks_per_node=1)


def _second_model(mesh: DeviceMesh) -> None:
    companions = FcdpOptions(
        strategy="zero3", companion_strategy="fcdp", options={"compute": "eager"}
    )
    loop = _begin(Accelerator, fcdp=companions)
    second = _model()
    second[0].bias.requires_grad_(False)  # a part of it stays frozen whatever happens
    assert loop.accelerator.prepare_model(second, evaluation_mode=True) is second
    assert not any(p.requires_grad for p in second.parameters())
    sent = []
    for _ in range(3):
        with torch.no_grad():
            second(torch.rand(4, 8))
        sent.append(fcdp_compile.traffic(second).total.bytes("inter", "all_gather"))
    assert sent[0] == sent[2] > 0, "frozen weights cross once"
    _train(loop)
    loop.accelerator.prepare_model(second)
    trained = [p.requires_grad for p in second.parameters()]
    assert trained == [True, False, True, True]
    second(torch.rand(4, 8)).sum().backward()
    assert [p.grad is not None for p in second.parameters()] == trained
    _refused(loop, mesh)


def _refused(loop: _Loop, mesh: DeviceMesh) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 8)).sum().backward()
    optimizer.step()
    with pytest.raises(ArgumentError, match=r"AdamW has a state of parameter '0\.weight'"):
        loop.accelerator.prepare(model, optimizer)
    sharded = fcdp_compile.shard(_model(), mesh)
    with pytest.raises(ValueError, match=r"FcdpOptions\(strategy='zero3'\) comes too late"):
        loop.accelerator.prepare(sharded)
    uneven = loop.accelerator.join_uneven_inputs([loop.model], even_batches=False)
    with pytest.raises(ArgumentError, match="every rank has a part of a sharded model"), uneven:
        pass
    with loop.accelerator.join_uneven_inputs([loop.model]):
        pass


@distributed
@pytest.mark.slow
def test_a_frozen_second_model_may_be_trained_later() -> None:
    run(_second_model, nodes=2, ranks_per_node=1)
