"""Ranks as two nodes, compared with each rank's own copy of the model: Gloo on one card, or NCCL on several.

NCCL does not allow two ranks on one GPU, so on one card transfers go through host memory, on lanes with
threads instead of streams.  torch's own backends compile the copy, and this module averages its gradients.
With dropout, model and copy draw random numbers in equal order: with eager kernels where Inductor compiles,
since its own numbers depend on the operators' positions in the graph.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import time
from dataclasses import dataclass, replace
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
from benchmarks.systems.model import make_batch, make_model
from benchmarks.systems.shape import Shape
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.devices import device_of
from fcdp_compile.plan import Direction, Variant
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.torch_compat.compilers import eager_random

NODES = 2
SHAPE = Shape(layers=3, width=128, vocabulary=199, batch=2, length=32)
TIGHT = "1MB"
"""A `device_memory` without room for a cache, so that node shards stay on the host."""

_STEPS = 4
_CASE_S = 15.0  # no case begins with less time left, or with less than the case before took
_QUICK_CASES = 2
_QLORA_NEEDS = ("bitsandbytes", "transformers", "peft")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParityMode:
    mode: str
    compute: str
    device_memory: str = ""
    is_checkpointed: bool = False
    dtype: str = "float32"
    strategy: str = "fcdp"


# The simplest first, then those that differ most: time may run out.
_CASES = {
    "eager": (
        _ParityMode(mode="full", compute="eager"),
        _ParityMode(mode="full", compute="eager", device_memory=TIGHT),
        _ParityMode(mode="lora", compute="eager", device_memory=TIGHT, is_checkpointed=True),
        _ParityMode(mode="lora", compute="eager"),
        _ParityMode(mode="full", compute="eager", is_checkpointed=True),
    ),
    "inductor": (
        _ParityMode(mode="full", compute="inductor"),
        _ParityMode(mode="full", compute="inductor", device_memory=TIGHT, is_checkpointed=True),
        _ParityMode(mode="lora", compute="inductor", device_memory=TIGHT, is_checkpointed=True),
        _ParityMode(mode="full", compute="inductor", is_checkpointed=True),
        _ParityMode(mode="lora", compute="inductor", is_checkpointed=True),
    ),
    "all": (
        _ParityMode(mode="full", compute="eager"),
        _ParityMode(mode="full", compute="inductor", device_memory=TIGHT),
        _ParityMode(mode="lora", compute="inductor", device_memory=TIGHT, dtype="bfloat16"),
        _ParityMode(mode="full", compute="eager", device_memory=TIGHT, is_checkpointed=True),
        _ParityMode(mode="qlora", compute="eager", device_memory=TIGHT),
        _ParityMode(mode="full", compute="inductor", dtype="bfloat16", is_checkpointed=True),
        _ParityMode(mode="full", compute="inductor", strategy="zero3"),
        _ParityMode(mode="lora", compute="inductor", is_checkpointed=True),
    ),
}


def parity(group: str, cases: str, setting: Setting) -> Parity:
    """Train the model of each case of a list and its copy; "gloo": all ranks share a card."""
    kind = setting.device.type
    backends = f"cpu:gloo,{kind}:gloo" if group == "gloo" else device_of(setting.device).backends
    dist.init_process_group(backends if kind != "cpu" else "gloo")
    mesh = fcdp_compile.make_mesh(nodes=NODES)
    assert mesh is not None, "several ranks have one"
    chosen = list(dict.fromkeys(_fitting(case, setting) for case in _CASES[cases]))
    if setting.is_quick:
        chosen = chosen[:_QUICK_CASES]
    missing = [name for name in _QLORA_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        chosen = [case for case in chosen if case.mode != "qlora"]
    found = Parity(planned=len(chosen), cases=[], missing=missing)
    took_s = 0.0
    for case in chosen:
        is_tried = setting.is_quick and not found.cases
        if not (is_tried or _all_have_time(setting, max(_CASE_S, took_s))):
            break
        began_s = time.monotonic()
        torch.compiler.reset()
        found.cases.append(_run(case, mesh, setting))
        setting.write(found)
        took_s = time.monotonic() - began_s
    return found


def _fitting(case: _ParityMode, setting: Setting) -> _ParityMode:
    """The case without what the setting lacks: Inductor, or norms in bf16 (`Setting.dtype`)."""
    compute = case.compute if setting.has_inductor else "eager"
    dtype = case.dtype if setting.dtype is torch.bfloat16 else "float32"
    return replace(case, compute=compute, dtype=dtype)


def _all_have_time(setting: Setting, seconds: float) -> bool:
    """Whether every rank has time: if one rank stopped, the others would wait for it."""
    has = torch.tensor(float(setting.has_time(seconds)))
    dist.all_reduce(has, op=dist.ReduceOp.MIN)
    return bool(has)


class _Checkpointed(nn.Module):
    """A block with dropout behind it, recomputed in the backward."""

    def __init__(self, block: nn.Module, dropout: float) -> None:
        super().__init__()
        self.block = block
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._compute, x, use_reentrant=False)
        return out

    def _compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.block(x))
        return out


def _run(case: _ParityMode, mesh: DeviceMesh, setting: Setting) -> ParityCase:
    device = setting.device
    model = _model(case, setting)
    plain = copy.deepcopy(model)
    fcdp_compile.shard(model, mesh, strategy=case.strategy)
    options: dict[str, Any] = {"compute": case.compute, "bucket_mb": 0.1}
    if case.device_memory:
        options["device_memory"] = case.device_memory
    is_inductor = case.compute == "inductor"
    nets = [
        torch.compile(model, backend="fcdp", options=options),
        torch.compile(plain, backend="inductor" if is_inductor else "aot_eager"),
    ]
    optimizers = [_sgd(model), _sgd(plain)]
    losses: list[list[float]] = [[], []]
    with eager_random() if is_inductor else contextlib.nullcontext():
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
    state = state_of(model)
    return ParityCase(
        mode=case.mode,
        strategy=case.strategy,
        dtype=case.dtype,
        compute=case.compute,
        device_memory=case.device_memory,
        is_checkpointed=case.is_checkpointed,
        losses=losses[0],
        plain_losses=losses[1],
        parameters_off=_parameters_off(model, plain),
        host_bytes=state.pool.slab_bytes,
        traffic={f"{link} {kind}": count for link, kind, count in moved if count},
        unplanned=_unplanned(state),
    )


def _unplanned(state: ShardedModel) -> str:
    """Return the bytes of the last step that are not those of the plans, by kind; empty if all agree."""
    planned: dict[str, int] = {}
    for plan in state.plans.values():
        forward = next(s for s in plan.schedules if s.direction is Direction.FORWARD)
        backwards = [s for s in plan.schedules if s.direction is Direction.BACKWARD]
        chosen = [forward, *(s for s in backwards if s.variant is Variant.COLD)]
        for kind, count in (pair for s in chosen for pair in s.bytes_by_kind().items()):
            planned[kind.value] = planned.get(kind.value, 0) + count
    moved = state.counters.last_step
    return ", ".join(
        f"{kind} {moved.get(kind, 0)} instead of {count}"
        for kind, count in planned.items()
        if moved.get(kind, 0) != count
    )


def _model(case: _ParityMode, setting: Setting) -> nn.Module:
    if case.mode == "qlora":
        qlora: nn.Module = importlib.import_module("benchmarks.qlora.model").make_model(
            SHAPE, case.mode
        )
        return qlora.to(setting.device)
    model = make_model(SHAPE, case.mode)
    if case.is_checkpointed:
        model.blocks = nn.ModuleList(_Checkpointed(b, setting.dropout) for b in model.blocks)
    return model.to(setting.device, getattr(torch, case.dtype))


def _sgd(model: nn.Module) -> torch.optim.SGD:
    # Not Adam: its first steps are as large as the learning rate however small a gradient is, so it
    # magnifies the rounding of gradients that should be zero.
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def _mean(loss: Tensor) -> float:
    mean = loss.detach().float().cpu()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def _average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            mean = parameter.grad.float().cpu()
            dist.all_reduce(mean)
            parameter.grad.copy_(mean / dist.get_world_size())


def _parameters_off(model: nn.Module, plain: nn.Module) -> float:
    """The largest difference; by names, since `shard` gives a quantised weight's parts other places."""
    worst, mine = 0.0, dict(model.named_parameters())
    for name, theirs in plain.named_parameters():
        if not theirs.is_floating_point():
            continue  # packed: the losses depend on it, and nothing changes it
        own = mine[name]
        assert isinstance(own, DTensor)
        off = (own.detach().full_tensor() - theirs.detach()).abs().max()
        worst = max(worst, (off / theirs.detach().abs().max().clamp(min=1e-3)).item())
    return worst
