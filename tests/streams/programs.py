"""Small jobs of every kind on one rank of 2 x 2, on a device that shows streams without order.

The device checks the order of its streams (`checked`), or has streams that are late (`late`).
The group is an echo (`benchmarks.gpu.workers.echo`): every other rank behaves as this rank does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fcdp_compile
from benchmarks.gpu.workers.echo import init_echo
from fcdp_compile.core.sharding import shard as shard_module
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.plan import Kind, Tier
from tests.device.build import extension
from tests.device.checked import CheckedDevice
from tests.device.sim import KIND, Sim
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


class Late(Sim):
    """The simulated device, with the memory in use that a test wants."""

    def __init__(self, *, is_blocking: bool) -> None:
        super().__init__(torch.device(KIND, 0))
        self._is_blocking = is_blocking
        self.used = 0

    def used_bytes(self) -> int:
        return self.used or super().used_bytes()

    def runs_on_stream(self, group: dist.ProcessGroup | None) -> bool:
        return not self._is_blocking


def checked(program: Program) -> CheckedDevice:
    """A device that raises StreamError where streams have no order; its kernels run at once."""
    return CheckedDevice(SimulatedDevice(0, is_blocking=program.is_blocking))


def late(program: Program) -> Late:
    """A device whose kernels run late; the caller has made it the default (`tests.device.sim.as_default`)."""
    return Late(is_blocking=program.is_blocking)


def set_used_bytes(device: CheckedDevice | Late, used: int) -> None:
    """Let the device say that this much of its memory is in use; 0: what is in use."""
    memory = device._device if isinstance(device, CheckedDevice) else device
    memory.used = used  # type: ignore[attr-defined]


class Job:
    """A model on a device, compiled by default.

    seen: what the steps on a late device computed besides parameters.
    """

    def __init__(
        self, program: Program, make: Callable[[Program], CheckedDevice | Late] = checked
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.seen: list[Tensor] = []
        self.device = make(program)
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
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.trained, lr=0.1)

    def loss(self, depth: int = 6) -> Tensor:
        found: Tensor = self.net(torch.ones(4, 32), depth).square().mean()
        self.see(found)
        return found

    def see(self, found: Tensor) -> None:
        """Copy a result to the host in the order of this thread's stream."""
        if isinstance(self.device, Late):
            copy = self.device.pinned_like(found)
            self.seen.append(copy.copy_(found.detach(), non_blocking=True))

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[Tensor]:
        """Copies of this rank's shards of the trained parameters, on the host."""
        return [p.detach().to_local().cpu().clone() for p in self.trained]

    def start_from(self, values: Sequence[Tensor]) -> None:
        """Give the trained parameters the values of `parameters`; forget what was seen."""
        self.seen.clear()
        for parameter, value in zip(self.trained, values, strict=True):
            parameter.detach().to_local().copy_(value)

    def alive_bytes(self) -> int:
        """The device memory of the job; what a checked device frees later in stream order counts as free."""
        gc.collect()
        if isinstance(self.device, CheckedDevice):
            return self.device.check.alive_bytes()
        self.device.synchronize()
        return int(extension().memory()["used"])


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
        job.see(fcdp_compile.full(frozen).sum())
        job.see(frozen.to_local().sum())  # type: ignore[attr-defined]
        assert sent.get(Kind.INTER_ALL_GATHER.value, 0) == before, "a copy of it is in the cache"
        job.see(fcdp_compile.full(trained).sum())
    gather_again(job)
    job.step()


def gather_again(job: Job) -> None:
    """Frozen buckets are gathered anew; only the cache keeps anything on the device."""
    model = state_of(job.model)
    known = {b.id: b for key in model.records for b in model.buckets.of(key) if b.bucket.frozen}
    for bucket in known.values():
        bucket.give_up()
        before = job.alive_bytes()
        with job.device.watching("what gathers again"):
            bucket.refresh()
        if bucket.placement.tier is Tier.HOST:
            assert job.alive_bytes() == before, f"bucket {bucket.id} left something on the device"
            bucket.release_shards()
            held = [r.places()[0].held for r in bucket.records]  # type: ignore[attr-defined]
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
    set_used_bytes(job.device, 10**9)
    for _ in range(3):  # one look at the memory answers many questions
        job.step()
    set_used_bytes(job.device, 0)


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
        kept = 0 if job.device.is_checked else FINGERPRINT_BYTES
        assert job.alive_bytes() <= before + kept, "what a failed step had started is still held"
    job.step()


def offload_gradients(job: Job) -> None:
    """Hooks read gradients on another stream, and the optimizer waits for it."""
    device = job.device
    stream = device.new_stream(is_urgent=False)

    def read(parameter: nn.Parameter) -> None:
        now = device.record()
        with device.on(stream), device.watching("a hook on another stream"):
            stream.wait_event(now)
            job.see(parameter.grad.to_local().sum())  # type: ignore[union-attr]

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


FINGERPRINT_BYTES = 512
"""The smallest block of the late device; there a model whose step has failed keeps one number more."""

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
def four_ranks(device: str = "cpu") -> Iterator[None]:
    """Within the block, the default group is an echo group of four ranks; this process is rank 0.

    device: the kind of device that it takes tensors of.
    """
    init_echo(2, 2, device)
    try:
        yield
    finally:
        dist.destroy_process_group()
