"""(b), (c), (e): LoRA steps whose frozen weights wait in host memory, beside steps with all on the device.

Two ranks share the device and play two nodes of one rank, so each keeps the whole model in host memory and
loads every layer twice a step; after the first step no frozen byte travels between them.  What is compared
is the same model under DDP with the same number of ranks, stepped in turn with ours in the same processes.
"""

from __future__ import annotations

import gzip
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fcdp_compile
from benchmarks.gpu_copies import synchronize, timed
from benchmarks.gpu_memory import peak_over, used_bytes
from benchmarks.gpu_parts import Fsdp2Peak, Steps
from benchmarks.model import Gpt, make_batch, make_model
from benchmarks.shape import Shape
from benchmarks.train_fcdp import FcdpTrainer
from benchmarks.train_torch import TorchTrainer
from fcdp_compile.sharding import state_of
from fcdp_compile.torch_compat import every_thread

RANKS = 2
_WARM_UP, _STEPS = 3, 8
_DTYPE = torch.bfloat16


def measure_steps(device: torch.device, shape: Shape, trace: Path) -> Steps:
    """Time both, by turns, and trace one of our steps; on every rank, with the same result.

    trace: where rank 0 writes the profiler's trace, gzipped.
    """
    baseline_bytes = used_bytes(device)
    model = _make(shape, device)
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    mesh = fcdp_compile.make_mesh(nodes=RANKS)
    sharded = fcdp_compile.shard(model, mesh, strategy="fcdp")
    cached = FcdpTrainer(sharded)
    _step(cached, shape, device)  # compiles, and fills the cache
    with peak_over(baseline_bytes, device) as peak:
        for _ in range(_WARM_UP):
            _step(cached, shape, device)
        synchronize(device)

    replicated = DistributedDataParallel(_make(shape, device))
    # As our segments are: Inductor on GPUs, ATen kernels on CPUs.
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    resident = TorchTrainer(
        torch.compile(replicated, backend=backend), list(replicated.parameters())
    )
    for _ in range(_WARM_UP):
        _step(resident, shape, device)
    seconds: dict[str, list[float]] = {"cached": [], "resident": []}
    for _ in range(_STEPS):
        for name, trainer in (("cached", cached), ("resident", resident)):
            dist.barrier()
            seconds[name].append(timed(partial(_step, trainer, shape, device), device))
    return Steps(
        shape=shape,
        dtype=str(_DTYPE).removeprefix("torch."),
        ranks=RANKS,
        frozen_bytes=frozen_bytes,
        host_bytes=state_of(sharded).pool.slab_bytes,
        cached_s=seconds["cached"],
        resident_s=seconds["resident"],
        cached_peak_bytes=peak.bytes,
        has_trace=_trace(cached, shape, device, trace),
    )


def measure_fsdp2(device: torch.device, shape: Shape) -> Fsdp2Peak:
    """The peak of FSDP2 with as many ranks, in one process.

    NCCL takes no two ranks on one GPU, so the process group is torch's fake one: collectives move nothing,
    numbers are nonsense, and memory is taken as with real ones.
    """
    baseline_bytes = used_bytes(device)
    model = _make(shape, device)
    mesh = init_device_mesh(device.type, (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trainer = TorchTrainer(model, list(model.parameters()))
    _step(trainer, shape, device)
    with peak_over(baseline_bytes, device) as peak:
        for _ in range(_WARM_UP):
            _step(trainer, shape, device)
        synchronize(device)
    return Fsdp2Peak(peak_bytes=peak.bytes)


def _make(shape: Shape, device: torch.device) -> Gpt:
    return make_model(shape, "lora").to(device=device, dtype=_DTYPE)


def _step(trainer: TorchTrainer, shape: Shape, device: torch.device) -> None:
    ids = make_batch(shape, rank=dist.get_rank(), number=0).to(device)
    trainer.micro_batch(ids, is_last=True, accumulation=1)
    trainer.step()


def _trace(trainer: TorchTrainer, shape: Shape, device: torch.device, path: Path) -> bool:
    """Trace a step; returns whether the trace shows our loads."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, experimental_config=every_thread()) as profiler:
        _step(trainer, shape, device)
        synchronize(device)
    has_loads = any(event.key.startswith("fcdp::load") for event in profiler.key_averages())
    if dist.get_rank() == 0:
        with tempfile.NamedTemporaryFile(suffix=".json") as plain:
            profiler.export_chrome_trace(plain.name)
            path.write_bytes(gzip.compress(Path(plain.name).read_bytes()))
    return has_loads
