"""Times of steps on lanes: on threads, on the streams of a simulated device, and on a card."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from builders_plan import make_steps
from fcdp_compile.devices import Cpu, Cuda
from fcdp_compile.plan import Kind, Lane, Step
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.marks import clock_of
from fcdp_compile.runtime.lanes.tasks import Begun, Pending
from fcdp_compile.runtime.recorder import Recorder
from tests.recorded import assert_causal, assert_in_turn
from tests.runtime.on_lanes import Gate
from tests.runtime.recorders import FORWARD, Clock, Steps, Written
from tests.runtime.simulated_device import Buffer, SimulatedDevice

CUDA = torch.device("cuda", 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_task_that_has_begun_lasts_until_it_is_finished() -> None:
    """The next task begins meanwhile, and lets the first go on."""
    lanes = Lanes(Cpu(), is_blocking=True)
    gates = [Gate(), Gate()]
    pending: list[Pending] = []

    def start(run: Callable[[], object]) -> None:
        pending.append(lanes.start(Lane.INTER, run, out=torch.zeros(1), reads=[], name="test"))

    def first() -> Begun:
        return Begun(gates[0])

    def second() -> Begun:
        gates.pop(0).open()
        return Begun(lambda: None)

    steps = [replace(step, waits=()) for step in make_steps([(Kind.INTER_ALL_GATHER, 0, 1)] * 2)]
    running = Steps(
        lanes, list(zip(steps, (partial(start, first), partial(start, second)), strict=True))
    )
    written = Written()
    recorder = Recorder(1, Clock(), written)
    for _ in range(2):
        running.run(recorder)
        for p in pending:
            p.wait()
        pending.clear()
    del recorder
    ((_, found),) = written.times
    (run,) = found[FORWARD].runs
    assert run.starts_s[0] < run.starts_s[1] < run.ends_s[0] < run.ends_s[1]
    assert_in_turn(run, steps, in_flight=2)


STARTED = (Kind.LOAD, Kind.STORE, Kind.INTER_ALL_GATHER, Kind.INTRA_ALL_GATHER)


def random_steps(chance: random.Random) -> list[Step]:
    """Tasks that read other tasks' results, compute, and waits for tasks; all follow the earlier compute."""
    steps: list[Step] = []
    unread: list[int] = []
    for index in range(14):
        kind = chance.choice([Kind.COMPUTE, *STARTED, Kind.WAIT, Kind.FREE])
        if kind is Kind.WAIT and not unread:
            kind = Kind.COMPUTE
        waits = {s.index for s in steps if s.lane is Lane.COMPUTE}
        if kind is Kind.WAIT:
            waits.add(unread.pop(chance.randrange(len(unread))))
        elif kind in STARTED:
            waits.update(chance.sample(unread, min(len(unread), chance.randrange(3))))
            unread.append(index)
        (step,) = make_steps([(kind, None if kind is Kind.COMPUTE else 0, 0)])
        steps.append(replace(step, index=index, waits=tuple(sorted(waits))))
    return steps


class OnDevice:
    """Random steps on the lanes of a fake device; each has some kernels, which record when they run."""

    def __init__(self, simulated: SimulatedDevice, seed: int, *, is_blocking: bool) -> None:
        self._simulated = simulated
        self._random = random.Random(seed)
        self._lanes = Lanes(simulated, is_blocking=is_blocking)
        self._pending: dict[int, Pending] = {}
        self.steps = random_steps(self._random)
        self.kernels: dict[int, list[int]] = {}
        self._launched = 0
        calls = [(step, partial(self._call, step)) for step in self.steps]
        self._running = Steps(self._lanes, calls)

    def run(self, recorder: Recorder) -> bool:
        """Issue all steps; whether the device has run all kernels that were launched, which is rare."""
        self._pending.clear()
        self.kernels = {step.index: [] for step in self.steps}
        self._launched = 0
        self._running.run(recorder)
        is_at_the_end = sum(map(len, self.kernels.values())) == self._launched
        for kind in STARTED:  # a thread may still issue tasks that are not waited for
            out: Any = Buffer(self._simulated)
            self._lanes.start(kind.lane, lambda: None, out=out, reads=[], name="").wait()
        return is_at_the_end

    def _call(self, step: Step) -> None:
        self._simulated.advance(self._random.randrange(8))
        launch = partial(self._launch, step.index, self._random.randrange(1, 4))
        if step.kind is Kind.COMPUTE:
            launch()
        elif step.kind is Kind.WAIT:
            self._pending[self._last_started(step)].wait()
        elif step.kind in STARTED:
            reads = [self._pending[i] for i in step.waits if i in self._pending]
            out: Any = Buffer(self._simulated)
            self._pending[step.index] = self._lanes.start(
                step.lane, launch, out=out, reads=reads, name="test"
            )

    def _last_started(self, step: Step) -> int:
        (started,) = (i for i in step.waits if i in self._pending)
        return started

    def _launch(self, index: int, kernels: int) -> None:
        ran = self.kernels[index]  # of this run, however far the device is
        self._launched += kernels
        for _ in range(kernels):
            self._simulated.launch(lambda: ran.append(self._simulated.time))


@pytest.mark.parametrize("is_blocking", [False, True], ids=["streams", "threads"])
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_on_a_device_times_are_those_of_the_kernels(is_blocking: bool, seed: int) -> None:
    simulated = SimulatedDevice(seed)
    device = OnDevice(simulated, seed, is_blocking=is_blocking)
    written = Written()
    recorder = Recorder(1, clock_of(simulated), written)
    device.run(recorder)
    is_at_the_end = device.run(recorder)
    assert is_at_the_end or not written.times, "written before the device has come to the end"
    simulated.synchronize_all()
    del recorder
    ((_, found),) = written.times
    (run,) = found[FORWARD].runs
    assert_causal(run, device.steps)
    assert_in_turn(run, device.steps, in_flight=1)
    # Kernels' times count from the beginning, a run's from its start: all differ by one number.
    starts, ends = ([round(1e3 * s) for s in times] for times in (run.starts_s, run.ends_s))
    earliest = max((k - ends[i] for i, ks in device.kernels.items() for k in ks), default=0)
    latest = min((k - starts[i] for i, ks in device.kernels.items() for k in ks), default=0)
    assert earliest < latest or not any(device.kernels.values())


@needs_cuda
@pytest.mark.gpu
def test_on_a_real_device() -> None:
    """A copy in, a product that waits for it, a copy out; nothing synchronises before the end."""
    lanes = Lanes(Cuda(CUDA), is_blocking=False)
    host, back = (torch.ones(2048, 2048).pin_memory() for _ in range(2))
    values: dict[str, Any] = {}

    def copy(lane: Lane, out: torch.Tensor, source: Any, name: str) -> None:
        tensor = source.tensor if isinstance(source, Pending) else source
        run = partial(out.copy_, tensor, non_blocking=True)
        values[name] = lanes.start(lane, run, out=out, reads=[source], name=name)

    entries = [(Kind.LOAD, 0, 1), (Kind.WAIT, 0, 0), (Kind.COMPUTE, None, 0), (Kind.STORE, 0, 1)]
    calls: list[Callable[[], object]] = [
        lambda: copy(Lane.H2D, torch.empty_like(host, device=CUDA), host, "loaded"),
        lambda: values.update(ready=values["loaded"].wait()),
        lambda: values.update(product=values["ready"] @ values["ready"]),
        lambda: copy(Lane.D2H, back, values["product"], "stored"),
    ]
    running = Steps(lanes, list(zip(make_steps(entries), calls, strict=True)))
    written = Written()
    recorder = Recorder(2, clock_of(Cuda(CUDA)), written)
    for _ in range(3):
        running.run(recorder)
    torch.cuda.synchronize()
    del recorder
    ((_, found),) = written.times
    assert len(found[FORWARD].runs) == 2
    for run in found[FORWARD].runs:
        assert_causal(run, running.steps)
        assert all(a < b for a, b in zip(run.starts_s, run.ends_s, strict=True))
    assert torch.equal(back, torch.full_like(back, 2048))
