"""A few steps of fcdp under two checkers of the order between streams: torch's and our own.

[Note: the sanitizer and compiled code]
torch's CUDA sanitizer is a dispatch mode, and under a dispatch mode Dynamo runs a model uncompiled (torch
2.11 to 2.15): TORCH_CUDA_SANITIZER=1 would watch gathers one by one and none of our programs.  So a backend
around "fcdp" enters the mode for the compiled code alone, and the loop enters it around the backward.  The
sanitizer sees operators and no Triton kernels, so segments use ATen's kernels here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import fcdp_compile
from benchmarks.gpu.results import Watched
from benchmarks.gpu.workers.copies import synchronize
from benchmarks.gpu.workers.echo import init_echo
from benchmarks.gpu.workers.setting import NotRunError, Setting
from benchmarks.gpu.workers.systems import NODES, RANKS_PER_NODE
from benchmarks.systems.model import make_batch, make_model
from benchmarks.systems.shape import QUICK
from benchmarks.systems.train_torch import make_adamw
from fcdp_compile.backend import fcdp
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.devices import StreamDevice, device_of
from fcdp_compile.plan import Kind
from fcdp_compile.torch_compat.tensors import Sanitizer, cuda_sanitizer
from tests.device.checked import check_streams

_WARM_UP, _STEPS = 2, 3
_ROOT = Path(__file__).resolve().parents[3]

_SANITIZER = "torch.cuda._sanitizer"
_STREAMS = "tests.device.checked"

Around = Callable[[], AbstractContextManager[object]]


def sanitizer(setting: Setting) -> Watched:
    """Train under torch's CUDA sanitizer, which prints and raises any fault."""
    if not setting.is_cuda:
        _train(setting, contextlib.nullcontext)
        raise NotRunError("there is no CUDA device for torch's CUDA sanitizer to watch")
    checker = cuda_sanitizer()
    finds_planted = _finds_planted(checker, setting.device)
    setting.write(Watched(by=_SANITIZER, steps=0, finds_planted=finds_planted))
    steps = _train(setting, lambda: checker.mode)
    return Watched(by=_SANITIZER, steps=steps, finds_planted=finds_planted)


def streams(setting: Setting) -> Watched:
    """Train on a device that checks the order of its streams; prints what it finds."""
    device = device_of(setting.device)
    if not isinstance(device, StreamDevice):
        _train(setting, contextlib.nullcontext)
        raise NotRunError("a CPU has no streams to check")
    check_streams(type(device))
    return Watched(by=_STREAMS, steps=_train(setting, contextlib.nullcontext), finds_planted=None)


def _train(setting: Setting, around: Around) -> int:
    """Train a small model with host-cached weights; returns the number of the last steps, within `around`."""
    init_echo(NODES, RANKS_PER_NODE, setting.device.type)
    is_watched = False

    def now() -> AbstractContextManager[object]:
        return around() if is_watched else contextlib.nullcontext()

    def watched(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = fcdp(gm, inputs, options={"device_memory": 1, "compute": "eager"})

        def call(*args: Any) -> Any:
            with now():
                return compiled(*args)

        return call

    mesh = fcdp_compile.make_mesh(nodes=NODES)
    model = fcdp_compile.shard(make_model(QUICK, "full").to(setting.device), mesh, strategy="fcdp")
    net = torch.compile(model, backend=watched)
    optimizer = make_adamw(list(model.parameters()))
    ids = make_batch(QUICK, rank=0, number=0).to(setting.device)
    for step in range(_WARM_UP + _STEPS):
        is_watched = step >= _WARM_UP
        loss = net(ids)
        with now():
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    synchronize(setting.device)
    if not state_of(model).counters.sent.get(Kind.LOAD.value):
        raise RuntimeError("no step has loaded from host memory, so no program of ours was watched")
    return _STEPS


def _finds_planted(checker: Sanitizer, device: torch.device) -> bool:
    """Whether the checker finds a deliberate fault: two streams use a tensor without a wait."""
    with checker.mode:
        values = torch.ones(1 << 20, device=device)
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                values.mul_(2)
        except checker.error:
            return True
    return False
