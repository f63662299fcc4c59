"""Time and memory of one rank's steps, with a trace of two of them.

For fcdp, the worker checks that every bucket is planned on the host and that the slabs hold the node shards
of the whole model, so that the measured step really loads from the host.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.gpu.results import Gaps, Trained
from benchmarks.gpu.workers.copies import synchronize, timed
from benchmarks.gpu.workers.memory import peak_over, used_bytes
from benchmarks.gpu.workers.setting import Setting
from benchmarks.gpu.workers.systems import NODES, RANKS_PER_NODE, make_trainer, shape_for
from benchmarks.gpu.workers.traces import FORWARD, gaps_of, kept_events
from benchmarks.systems.model import make_batch, make_model
from benchmarks.systems.shape import Shape
from benchmarks.systems.train_torch import TorchTrainer
from fcdp_compile.core.sharding.shard import state_of
from fcdp_compile.devices import StreamDevice
from fcdp_compile.plan import Tier
from fcdp_compile.runtime.collectives.collectives import are_blocking
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.torch_compat import every_thread

_WARM_UP, _STEPS, _TRACED = 2, 10, 2
_TRACE_S = 6.0  # to trace and write; of FSDP2, an H200's processor needed five
_LEAST = 3  # steps that are timed even if time is short


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """A trainer, and the one batch that it trains on."""

    trainer: TorchTrainer
    ids: Tensor

    def step(self) -> Tensor:
        loss = self.passes()
        self.trainer.step()
        return loss

    def passes(self) -> Tensor:
        with record_function(FORWARD):
            loss: Tensor = self.trainer.model(self.ids)
        loss.backward()
        return loss.detach()


def train(system: str, mode: str, setting: Setting) -> Trained:
    """Train with a system and measure; writes the findings before the trace, which may fail."""
    shape = shape_for(setting)
    baseline_bytes = used_bytes(setting.device)
    trainer = make_trainer(system, mode, shape, setting)
    ids = make_batch(shape, rank=0, number=0).to(setting.device)
    loop = _Loop(trainer=trainer, ids=ids)
    began_s = time.perf_counter()
    losses = [loop.step().item()]
    first_step_s = time.perf_counter() - began_s
    for _ in range(_WARM_UP):
        losses.append(loop.step().item())
    seconds: list[float] = []
    with peak_over(baseline_bytes, setting.device) as peak:
        while len(seconds) < _LEAST or (len(seconds) < _STEPS and setting.has_time()):
            seconds.append(timed(loop.step, setting.device))
    with peak_over(baseline_bytes, setting.device) as passes_peak:
        losses.append(loop.passes().item())
    trainer.step()
    found = Trained(
        system=system,
        mode=mode,
        shape=shape,
        dtype=str(setting.dtype).removeprefix("torch."),
        nodes=NODES,
        ranks_per_node=RANKS_PER_NODE,
        parameter_bytes=_parameter_bytes(shape, mode, setting.dtype),
        first_step_s=first_step_s,
        step_s=seconds,
        losses=losses,
        peak_bytes=peak.bytes,
        passes_peak_bytes=passes_peak.bytes,
    )
    if system == "fcdp":
        found = _with_places(found, trainer)
    setting.write(found)
    if not setting.has_time(_TRACE_S):
        return found
    return replace(found, gaps=_trace(loop, setting, f"{system}-{mode}"))


def _parameter_bytes(shape: Shape, mode: str, dtype: torch.dtype) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in make_model(shape, mode).parameters()) * dtype.itemsize


def _with_places(found: Trained, trainer: TorchTrainer) -> Trained:
    """Add where fcdp keeps its buckets.

    Raises: RuntimeError if buckets are not in host memory or lanes are not streams: it would measure nothing.
    """
    state: ShardedModel = state_of(trainer.model)
    if isinstance(state.device, StreamDevice) and are_blocking(state.topology, state.device):
        raise RuntimeError(
            "fcdp takes the echo group for one that blocks, so lanes are not streams"
        )
    placements = {p.bucket: p for plan in state.plans.values() for p in plan.placements}.values()
    on_host = sum(p.tier is Tier.HOST for p in placements)
    found = replace(
        found,
        predicted_peak_bytes=state.predicted_peak_bytes,
        host_bytes=state.pool.slab_bytes,
        host_buckets=on_host,
        device_buckets=len(placements) - on_host,
    )
    least_bytes = found.parameter_bytes // RANKS_PER_NODE
    if found.device_buckets or found.host_bytes < least_bytes:
        raise RuntimeError(
            f"{found.device_buckets} of {len(placements)} buckets stay on the device and slabs hold "
            f"{found.host_bytes} bytes where node shards take {least_bytes}: nothing would be measured"
        )
    return found


def _trace(loop: _Loop, setting: Setting, name: str) -> Gaps:
    """Trace some steps; writes the events that show where time goes to a gzipped file."""
    activities = [ProfilerActivity.CPU]
    if setting.is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, experimental_config=every_thread()) as profiler:
        for _ in range(_TRACED):
            loop.step()
        synchronize(setting.device)
    with tempfile.NamedTemporaryFile(suffix=".json") as plain:
        profiler.export_chrome_trace(plain.name)
        trace = json.loads(Path(plain.name).read_text(encoding="utf-8"))
    events = trace["traceEvents"]
    kept = json.dumps({"traceEvents": kept_events(events)}).encode()
    (setting.folder / f"trace-{name}.json.gz").write_bytes(gzip.compress(kept, mtime=0))
    return gaps_of(events, has_kernels=setting.is_cuda)
