"""Small jobs of every kind on one rank of 2 x 2, on a simulated device that checks its streams.

The group is an echo (`benchmarks.gpu.workers.echo`): every other rank behaves as this rank does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fcdp_compile
from benchmarks.gpu.workers.echo import init_echo
from fcdp_compile.devices import CheckedDevice
from fcdp_compile.plan import Kind, Tier
from fcdp_compile.sharding import shard as shard_module
from fcdp_compile.sharding.shard import state_of
from tests.runtime.simulated_device import SimulatedDevice

BUCKET_MB = 0.004  # one or two layers in a bucket


class Adapted(nn.Module):
    """A frozen layer and a low-rank update of it that is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


class Stack(nn.Module):
    """Layers; a forward may use only the first ones."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(6))

    def forward(self, x: Tensor, depth: int = 6) -> Tensor:
        for layer in self.layers[:depth]:
            x = torch.relu(layer(x))
        return x


def dense() -> Stack:
    return Stack(lambda: nn.Linear(32, 32))


def adapted() -> Stack:
    return Stack(lambda: Adapted(32))


class Job:
    """A model on a checked device, compiled by default; `alive` is the device memory after each round."""

    def __init__(self, program: Program) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.device = CheckedDevice(SimulatedDevice(0, is_blocking=program.is_blocking))
        self.model = program.build()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard_module, "_device_of", lambda names, topology: self.device)
            mesh = fcdp_compile.make_mesh(nodes=program.nodes)
            fcdp_compile.shard(
                self.model,
                mesh,
                strategy=program.strategy,
                gradient_on=program.gradient_on,
                offload_params=program.offload_params,
            )
        options = {"compute": program.compute, "bucket_mb": BUCKET_MB, **program.options}
        self.is_layered = program.is_layered
        self.net: Any = self.model
        if program.is_layered:
            for layer in self.model.layers:
                layer.compile(backend="fcdp", options=options)
        elif program.compute is not None:
            self.net = torch.compile(self.model, backend="fcdp", options=options)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=0.1)

    def loss(self, depth: int = 6) -> Tensor:
        found: Tensor = self.net(torch.ones(4, 32), depth).square().mean()
        return found

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def alive_bytes(self) -> int:
        gc.collect()
        return self.device.check.alive_bytes()


def train(job: Job) -> None:
    job.step()
    job.step()


def train_eagerly(job: Job) -> None:
    with job.device.watching("an uncompiled step"):
        job.loss().backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def evaluate_too(job: Job) -> None:
    """Released frozen parameters are loaded again when they are read."""
    job.step()
    with torch.no_grad():
        job.loss()
    frozen = next(p for p in job.model.parameters() if not p.requires_grad)
    trained = next(p for p in job.model.parameters() if p.requires_grad)
    sent = state_of(job.model).counters.sent
    with job.device.watching("what reads a parameter"):
        before = sent.get(Kind.INTER_ALL_GATHER.value, 0)
        fcdp_compile.full(frozen).sum()
        frozen.to_local().sum()  # type: ignore[attr-defined]
        assert sent.get(Kind.INTER_ALL_GATHER.value, 0) == before, "a copy of it is in the cache"
        fcdp_compile.full(trained).sum()
    gather_again(job)
    job.step()


def gather_again(job: Job) -> None:
    """Frozen buckets are gathered anew; only the cache keeps anything on the device."""
    model = state_of(job.model)
    known = {b.id: b for key in model.records for b in model.buckets.of(key) if b.frozen}
    for bucket in known.values():
        model.records.shards(bucket)  # loads shards that only the cache has
        model.cache.drop(bucket.id)
        before = job.device.check.alive_bytes()
        with job.device.watching("what gathers again"):
            model.upkeep.refresh(bucket)
        if model.placements[bucket.id].tier is Tier.HOST:
            assert job.device.check.alive_bytes() == before, (
                f"bucket {bucket.id} left something on the device"
            )
            model.upkeep.release_shards(bucket)
            held = [r.places()[0].held for r in model.records.of(bucket)]  # type: ignore[attr-defined]
            assert all(shard.untyped_storage().nbytes() == 0 for shard in held), "not released"


def accumulate(job: Job) -> None:
    """Three micro-batches accumulate, the next reduces; one gradient is cleared before the third."""
    with fcdp_compile.no_sync(job.model):
        job.loss().backward()
        job.loss().backward()
        parameter = next(p for p in job.model.parameters() if p.requires_grad)
        parameter.grad = None
        with job.device.watching("what forgets a cleared gradient"):
            state_of(job.model).accumulation.settle()
        job.loss().backward()
    job.step()


def leave_some_out(job: Job) -> None:
    """The last micro-batch, which reduces gradients, uses only the first layers."""
    with fcdp_compile.no_sync(job.model):
        job.loss().backward()
    job.loss(depth=2).backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def fall_back(job: Job) -> None:
    """The device runs short of memory after it has kept buckets."""
    gather_again(job)
    job.step()
    memory = job.device._device
    memory.used = 10**9  # type: ignore[attr-defined]
    for _ in range(3):  # one look at the memory answers many questions
        job.step()
    memory.used = 0  # type: ignore[attr-defined]


class _PeerIsGoneError(Exception):
    """The error of a collective in `fail_midway`."""


def fail_midway(job: Job) -> None:
    """A forward and a backward fail with transfers under way; the next step must work as usual."""
    collectives = state_of(job.model).collectives
    for kind in (Kind.INTRA_ALL_GATHER, Kind.INTER_REDUCE_SCATTER):
        job.step()
        before = job.alive_bytes()
        with _failing(collectives, kind), pytest.raises(_PeerIsGoneError):
            job.loss().backward()
        job.optimizer.zero_grad()
        if job.is_layered:  # what has started for the next program is dropped in the next forward
            job.step()
        assert job.alive_bytes() <= before, "what a failed step had started is still held"
    job.step()


def offload_gradients(job: Job) -> None:
    """Hooks read gradients on another stream, and the optimizer waits for it."""
    device = job.device
    stream = device.new_stream(is_urgent=False)

    def read(parameter: nn.Parameter) -> None:
        now = device.record()
        with device.on(stream), device.watching("a hook on another stream"):
            stream.wait_event(now)
            device.note([parameter.grad.to_local()], [], "a hook's read")  # type: ignore[union-attr]

    handles = [p.register_post_accumulate_grad_hook(read) for p in job.model.parameters()]
    for _ in range(2):
        job.loss().backward()
        with device.on(stream):
            now = device.record()
        device.current_stream().wait_event(now)
        job.optimizer.step()
        job.optimizer.zero_grad()
    for handle in handles:
        handle.remove()


@contextmanager
def _failing(collectives: Any, kind: Kind) -> Iterator[None]:
    """The third collective of a kind fails before it is given to its lane."""
    left = [3]

    def failing(start: Callable[..., Any]) -> Callable[..., Any]:
        def call(of: Kind, *args: Any, **more: Any) -> Any:
            left[0] -= of is kind
            if of is kind and not left[0]:
                raise _PeerIsGoneError
            return start(of, *args, **more)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "reduction"):
            patch.setattr(collectives, name, failing(getattr(collectives, name)))
        yield


@dataclass(frozen=True, kw_only=True)
class Program:
    """A model and how it is trained.

    compute: None for an uncompiled model.  is_layered: whether each layer is compiled on its own.
    is_blocking: whether collectives block, so that lanes are threads.  nodes: of the four ranks.
    """

    build: Callable[[], nn.Module] = dense
    strategy: str = "fcdp"
    gradient_on: str | None = None
    compute: str | None = "eager"
    options: dict[str, Any] = field(default_factory=dict)
    once: Callable[[Job], None] = train
    is_layered: bool = False
    is_blocking: bool = False
    nodes: int = 2
    offload_params: bool = False


PACKED = {"bucket_mb": 4 * BUCKET_MB}
"""Several parameters in a bucket, so that the gather sends a copy and not a home shard itself."""

ON_THE_DEVICE = {"device_memory": "1GB"}

PROGRAMS = {
    "full": Program(),
    "zero3": Program(strategy="zero3"),
    "offloaded": Program(offload_params=True, once=accumulate),
    "offloaded in zero3": Program(offload_params=True, strategy="zero3", options=PACKED),
    "offloaded on one node": Program(offload_params=True, build=adapted, nodes=1),
    "offloaded, layers": Program(offload_params=True, strategy="zero3", is_layered=True),
    "offloaded, a step that fails": Program(
        offload_params=True, strategy="zero3", once=fail_midway
    ),
    "offloaded, eagerly": Program(offload_params=True, compute=None, once=train_eagerly),
    "adapters": Program(build=adapted, once=evaluate_too),
    "adapters on the GPU": Program(build=adapted, options=ON_THE_DEVICE, once=evaluate_too),
    "adapters on one node": Program(build=adapted, once=evaluate_too, nodes=1),
    "adapters on one node, memory short": Program(
        build=adapted, options=ON_THE_DEVICE, once=fall_back, nodes=1
    ),
    "on the GPU": Program(options=ON_THE_DEVICE),
    "memory that becomes short": Program(options=ON_THE_DEVICE, once=fall_back),
    "adapters, memory short": Program(build=adapted, options=ON_THE_DEVICE, once=fall_back),
    "accumulation": Program(once=accumulate),
    "accumulation in zero3": Program(strategy="zero3", once=accumulate),
    "accumulation on the GPU": Program(options=PACKED | ON_THE_DEVICE, once=accumulate),
    "accumulation on the host": Program(gradient_on="host", options=PACKED, once=accumulate),
    "the rest": Program(gradient_on="host", once=leave_some_out),
    "w8+g4": Program(strategy="fcdp+w8+g4"),
    "c8+c4": Program(strategy="fcdp+c8+c4", build=adapted),
    "ring": Program(strategy="zero3+ring", options=PACKED),
    "ho_ring": Program(strategy="zero3+ho_ring", options=PACKED),
    "ho_ring+w8": Program(strategy="zero3+w8+ho_ring"),
    "ddp": Program(strategy="ddp"),
    "zero2": Program(strategy="zero2"),
    "mics": Program(strategy="mics"),
    "through the host": Program(once=accumulate, is_blocking=True),
    "a step that fails": Program(once=fail_midway),
    "a step that fails, quantised": Program(strategy="zero3+w8", once=fail_midway),
    "layers": Program(is_layered=True),
    "layers with adapters": Program(build=adapted, is_layered=True),
    "layers, accumulation": Program(is_layered=True, once=accumulate),
    "layers, through the host": Program(is_layered=True, is_blocking=True),
    "layers, gradients read on another stream": Program(is_layered=True, once=offload_gradients),
    "layers, a step that fails": Program(is_layered=True, once=fail_midway),
    "uncompiled": Program(compute=None, once=train_eagerly),
}


@contextmanager
def four_ranks() -> Iterator[None]:
    """Within the block, the default group is an echo group of four ranks; this process is rank 0."""
    init_echo(2, 2)
    try:
        yield
    finally:
        dist.destroy_process_group()
