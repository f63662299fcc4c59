"""Transfers and collectives on lanes, called directly, in a group of one rank: NCCL on a GPU.

`Collectives` skips collectives of one rank, so this module gives tasks to the lanes itself.  The compute
stream reads each result right after `wait`, while the lane may still be busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.results import LaneRun, LaneRuns
from benchmarks.gpu.workers.copies import synchronize
from benchmarks.gpu.workers.setting import Setting
from fcdp_compile.core.ranks.lost_ranks import Wait
from fcdp_compile.devices import device_of
from fcdp_compile.plan import Lane
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.bodies import (
    all_reduce,
    gather_encoded,
    gather_own,
    reduce_encoded,
    reduce_scatter,
)
from fcdp_compile.runtime.collectives.channel import Channel
from fcdp_compile.runtime.collectives.quantize import Codec
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending, Run
from fcdp_compile.strategy.formats import CODINGS, Format

_ELEMENTS, _QUICK_ELEMENTS = 1 << 24, 1 << 12
_TIMES, _QUICK_TIMES = 200, 5
_WAIT = Wait(lambda: "a collective of one rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaneCase:
    """A kind of task.  tolerance: largest error of a value; inputs are from -1 to 1."""

    name: str
    lane: Lane
    run: Callable[[Tensor, Tensor, Channel], Run]
    tolerance: float = 0.0


def lane_runs(setting: Setting) -> LaneRuns:
    """Check and time each kind of task."""
    backend = device_of(setting.device).backends
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    device = device_of(setting.device)
    is_blocking = not device.runs_on_stream(group)
    lanes = Lanes(device, is_blocking=is_blocking)
    elements = _QUICK_ELEMENTS if setting.is_quick else _ELEMENTS
    times = _QUICK_TIMES if setting.is_quick else _TIMES
    runs: list[LaneRun] = []
    for case in _cases(elements, setting.device):
        is_right = _is_right(lanes, case, elements, setting.device)
        runs.append(
            LaneRun(
                name=case.name,
                is_right=is_right,
                issue_us=_issue_us(lanes, case, setting.device, times),
            )
        )
        setting.write(LaneRuns(backend=backend, is_blocking=is_blocking, runs=runs))
    runs.append(_round_trip(lanes, elements, setting.device))
    return LaneRuns(backend=backend, is_blocking=is_blocking, runs=runs)


def _started(lanes: Lanes, case: _LaneCase, out: Tensor, source: Tensor) -> Pending:
    scratch = lanes.scratch()
    channel = Channel(dist.group.WORLD, 1, lanes.device, _WAIT, scratch)
    run = case.run(out, source, channel)
    return lanes.start(case.lane, run, out=out, reads=[source], name="", scratch=scratch)


def _cases(elements: int, device: torch.device) -> list[_LaneCase]:
    codec = Codec(Format.INT8, [elements])
    small = Codec(Format.INT8, [_QUICK_ELEMENTS])
    rounding = 1.0 / CODINGS[Format.INT8].largest

    def fitting(out: Tensor) -> Codec:
        return codec if out.numel() == elements else small

    def encoded(out: Tensor, send: Tensor, channel: Channel) -> Run:
        travels = torch.empty(fitting(out).bytes, dtype=torch.uint8, device=device)
        return partial(gather_encoded, out, travels, send, fitting(out), channel)

    return [
        _LaneCase(
            name="copy", lane=Lane.INTRA, run=lambda out, send, channel: partial(out.copy_, send)
        ),
        _LaneCase(
            name="all-gather",
            lane=Lane.INTER,
            run=lambda out, send, channel: partial(channel.all_gather, out, send),
        ),
        _LaneCase(name="all-gather, int8", lane=Lane.INTER, run=encoded, tolerance=rounding),
        _LaneCase(
            name="all-gather, own",
            lane=Lane.INTRA,
            run=lambda out, send, channel: partial(gather_own, out, send, None, channel),
        ),
        _LaneCase(
            name="reduce-scatter",
            lane=Lane.INTRA,
            run=lambda out, send, channel: partial(reduce_scatter, out, send, channel),
        ),
        _LaneCase(
            name="reduce-scatter, int8",
            lane=Lane.INTER,
            run=lambda out, send, channel: partial(
                reduce_encoded, out, send, fitting(out), channel
            ),
            tolerance=rounding,
        ),
        _LaneCase(
            name="all-reduce",
            lane=Lane.INTER,
            run=lambda out, send, channel: partial(all_reduce, out, send, channel),
        ),
    ]


def _is_right(lanes: Lanes, case: _LaneCase, elements: int, device: torch.device) -> bool:
    """Whether the lane reads the compute stream's result, and compute the lane's, in the right order."""
    expected = torch.linspace(-1, 1, elements, device=device)
    source, out = torch.zeros_like(expected), torch.zeros_like(expected)
    synchronize(device)
    _busy(device)
    source.copy_(expected)
    pending = _started(lanes, case, out, source)
    off = (pending.wait() - expected).abs().max().item()
    return off <= case.tolerance


def _issue_us(lanes: Lanes, case: _LaneCase, device: torch.device, times: int) -> float:
    source = torch.zeros(_QUICK_ELEMENTS, device=device)
    out = torch.zeros_like(source)
    found = []
    for _ in range(times):
        began_s = time.perf_counter()
        pending = _started(lanes, case, out, source)
        found.append(time.perf_counter() - began_s)
        pending.wait()
        synchronize(device)
    return 1e6 * median(found)


def _round_trip(lanes: Lanes, elements: int, device: torch.device) -> LaneRun:
    """Store to a slab of the pool and load it back, on two lanes; the load waits for the store."""
    pool = PinnedPool(device_of(device))
    slab = pool.take(elements, torch.float32)
    expected = torch.linspace(-1, 1, elements, device=device)
    source, back = torch.zeros_like(expected), torch.zeros_like(expected)
    synchronize(device)
    _busy(device)
    source.copy_(expected)
    began_s = time.perf_counter()
    store = partial(slab.copy_, source, non_blocking=True)
    stored = lanes.start(Lane.D2H, store, out=slab, reads=[source], name="")
    load = partial(back.copy_, slab, non_blocking=True)
    loaded = lanes.start(Lane.H2D, load, out=back, reads=[stored], name="")
    issue_us = 1e6 * (time.perf_counter() - began_s)
    is_right = bool((loaded.wait() == expected).all())
    return LaneRun(name="store, then load", is_right=is_right, issue_us=issue_us)


def _busy(device: torch.device) -> None:
    """Keep the compute stream busy for a while, so that a missing wait shows."""
    if device.type == "cuda":
        matrix = torch.ones(4096, 4096, device=device)
        for _ in range(10):
            matrix = matrix @ matrix * 1e-4
