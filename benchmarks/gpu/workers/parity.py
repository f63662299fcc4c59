"""Four ranks on one device over Gloo, as two nodes, compared with each rank's own copy of the model.

NCCL does not allow two ranks on one GPU, so transfers go through host memory, on lanes with threads instead
of streams.  torch's own backends compile the copy, and this module averages its gradients.  With dropout,
model and copy draw random numbers with eager kernels, in equal order.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fcdp_compile
from benchmarks.gpu.results import Parity, ParityCase
from benchmarks.gpu.workers.setting import Setting
from benchmarks.systems.model import Gpt, make_batch, make_model
from benchmarks.systems.shape import Shape
from fcdp_compile.sharding.shard import state_of
from fcdp_compile.torch_compat import eager_random

NODES = 2
SHAPE = Shape(layers=3, width=128, vocabulary=199, batch=2, length=32)
TIGHT = "1MB"
"""A `device_memory` without room for a cache, so that node shards stay on the host."""

_STEPS = 4
_DROPOUT = 0.1
_CASE_S = 15.0  # least time of a case; with less time left, no case begins


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParityMode:
    mode: str
    compute: str
    device_memory: str = ""
    is_checkpointed: bool = True


_QUICK = (
    _ParityMode(mode="full", compute="eager", device_memory=TIGHT),
    _ParityMode(mode="lora", compute="eager", is_checkpointed=False),
)
# The two cases that differ most come first: time may run out.
_CASES = (
    _ParityMode(mode="full", compute="inductor", device_memory=TIGHT),
    _ParityMode(mode="lora", compute="eager"),
    _ParityMode(mode="full", compute="eager", device_memory=TIGHT),
    _ParityMode(mode="lora", compute="inductor", device_memory=TIGHT),
    _ParityMode(mode="full", compute="inductor"),
    _ParityMode(mode="lora", compute="inductor"),
    _ParityMode(mode="full", compute="eager"),
    _ParityMode(mode="lora", compute="eager", device_memory=TIGHT),
    _ParityMode(mode="full", compute="inductor", is_checkpointed=False),
)


def parity(setting: Setting) -> Parity:
    """Train the model of each case and its copy."""
    dist.init_process_group("cpu:gloo,cuda:gloo" if setting.is_cuda else "gloo")
    mesh = fcdp_compile.make_mesh(nodes=NODES)
    assert mesh is not None, "several ranks have one"
    cases = _QUICK if setting.is_quick else _CASES
    found = Parity(planned=len(cases), cases=[])
    for case in cases:
        if not _all_have_time(setting):
            break
        torch.compiler.reset()
        found.cases.append(_run(case, mesh, setting.device))
        setting.write(found)
    return found


def _all_have_time(setting: Setting) -> bool:
    """Whether every rank has time: if one rank stopped, the others would wait for it."""
    has = torch.tensor(float(setting.has_time(_CASE_S) or setting.is_quick))
    dist.all_reduce(has, op=dist.ReduceOp.MIN)
    return bool(has)


class _Checkpointed(nn.Module):
    """A block with dropout behind it, recomputed in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return out

    def _compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.block(x))
        return out


def _run(case: _ParityMode, mesh: DeviceMesh, device: torch.device) -> ParityCase:
    model = _model(case, device)
    plain = copy.deepcopy(model)
    fcdp_compile.shard(model, mesh, strategy="fcdp")
    options: dict[str, Any] = {"compute": case.compute, "bucket_mb": 0.1}
    if case.device_memory:
        options["device_memory"] = case.device_memory
    nets = [
        torch.compile(model, backend="fcdp", options=options),
        torch.compile(plain, backend="inductor" if case.compute == "inductor" else "aot_eager"),
    ]
    optimizers = [_sgd(model), _sgd(plain)]
    losses: list[list[float]] = [[], []]
    # Without this, Inductor draws other numbers, which depend on the operators' positions in the graph.
    with eager_random():
        for number in range(_STEPS):
            ids = make_batch(SHAPE, rank=dist.get_rank(), number=number).to(device)
            for net, kept in zip(nets, losses, strict=True):
                torch.manual_seed(100 * number + dist.get_rank())
                loss = net(ids)
                loss.backward()
                kept.append(_mean(loss))
            _average_gradients(plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    moved = fcdp_compile.traffic(model).last_step.rows
    return ParityCase(
        mode=case.mode,
        compute=case.compute,
        device_memory=case.device_memory,
        is_checkpointed=case.is_checkpointed,
        losses=losses[0],
        plain_losses=losses[1],
        parameters_off=_parameters_off(model, plain),
        host_bytes=state_of(model).pool.slab_bytes,
        traffic={f"{link} {kind}": count for link, kind, count in moved if count},
    )


def _model(case: _ParityMode, device: torch.device) -> Gpt:
    model = make_model(SHAPE, case.mode)
    if case.is_checkpointed:
        model.blocks = nn.ModuleList(_Checkpointed(block) for block in model.blocks)
    return model.to(device)


def _sgd(model: nn.Module) -> torch.optim.SGD:
    # Not Adam: its first steps are as large as the learning rate however small a gradient is, so it
    # magnifies the rounding of gradients that should be zero.
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _mean(loss: Tensor) -> float:
    mean = loss.detach().cpu()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def _average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = parameter.grad.cpu()
            dist.all_reduce(mean)
            parameter.grad.copy_(mean / dist.get_world_size())


def _parameters_off(model: nn.Module, plain: nn.Module) -> float:
    worst = 0.0
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        off = (mine.detach().full_tensor() - theirs.detach()).abs().max()
        worst = max(worst, (off / theirs.detach().abs().max().clamp(min=1e-3)).item())
    return worst
