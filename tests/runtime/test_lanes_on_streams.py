"""Lanes whose buffers are on a CUDA device: streams of their own, or threads that issue to streams."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fcdp_compile.devices import Cuda
from fcdp_compile.plan import Lane
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending
from tests.runtime.simulated_device import Buffer, Memory, SimulatedDevice

CUDA = torch.device("cuda", 0)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
ALL = (Lane.INTER, Lane.INTRA, Lane.H2D, Lane.D2H)


class Program:
    """Random tasks that read each other's results and compute's; waited for or not, in any order.

    Every result is one more than the sum of its inputs.
    """

    def __init__(self, device: SimulatedDevice, seed: int, *, is_blocking: bool) -> None:
        self._device = device
        self._random = random.Random(seed)
        self._lanes = Lanes(device, is_blocking=is_blocking)
        self._started: list[tuple[Pending, float]] = []
        self._ready: list[tuple[Buffer, float]] = [self._computed([])]
        self.seen: list[tuple[float, float]] = []

    def run(self, steps: int) -> None:
        """Run tasks; `seen` gets the values that compute read, each with the expected value."""
        for _ in range(steps):
            self._random.choice([self._start, self._start, self._wait, self._compute, self._drop])()
            self._device.advance(self._random.randrange(4))
        while self._started:
            self._wait()
        self._computed(self._ready)
        for lane in ALL:  # a thread may still issue tasks that are not waited for
            self._lanes.start(
                lane, lambda: None, out=Buffer(self._device), reads=[], name=""
            ).wait()
        self._device.synchronize_all()

    def _start(self) -> None:
        reads = self._some([*self._started, *self._ready])
        buffers = [r.tensor if isinstance(r, Pending) else r for r, _ in reads]
        inputs, out = [b.memory for b in buffers], Buffer(self._device)
        target = out.memory

        def run() -> None:
            self._device.launch(lambda: setattr(target, "value", 1 + sum(i.value for i in inputs)))

        pending = self._lanes.start(
            self._random.choice(ALL), run, out=out, reads=[r for r, _ in reads], name="test"
        )
        self._started.append((pending, 1 + sum(v for _, v in reads)))

    def _wait(self) -> None:
        if self._started:
            pending, value = self._started.pop(self._random.randrange(len(self._started)))
            self._ready.append((pending.wait(), value))

    def _compute(self) -> None:
        self._ready.append(self._computed(self._some(self._ready)))

    def _computed(self, reads: list[tuple[Buffer, float]]) -> tuple[Buffer, float]:
        inputs, out = [r.memory for r, _ in reads], Buffer(self._device)
        target, expected = out.memory, [v for _, v in reads]

        def kernel() -> None:
            self.seen += zip([i.value for i in inputs], expected, strict=True)
            target.value = 1 + sum(i.value for i in inputs)

        self._device.launch(kernel)
        return out, 1 + sum(expected)

    def _drop(self) -> None:
        """Drop tensors that other tasks may still read, and results that are never waited for."""
        self._ready = self._ready[-1:]
        if self._started and self._random.random() < 0.3:
            self._started.pop(0)

    def _some(self, of: list[Any]) -> list[Any]:
        return self._random.sample(of, min(len(of), self._random.randrange(1, 4)))


def run(seed: int, *, is_blocking: bool = False) -> list[tuple[float, float]]:
    """The values that the compute of a random program read, each with the expected value."""
    program = Program(SimulatedDevice(seed), seed, is_blocking=is_blocking)
    program.run(40)
    return program.seen


@pytest.mark.parametrize("is_blocking", [False, True], ids=["streams", "threads"])
@settings(max_examples=150)
@given(seed=st.integers(0, 2**32))
def test_compute_reads_what_it_should(is_blocking: bool, seed: int) -> None:
    seen = run(seed, is_blocking=is_blocking)
    assert all(got == expected for got, expected in seen)


def order_nothing(self: object) -> None:
    """In place of making the current stream wait."""


def hold_nothing(self: object, lane: Lane, after: Any, held: list[object]) -> dict[Lane, int]:
    """In place of `LaneClocks.add`."""
    return {}


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("fcdp_compile.runtime.lanes.task_lanes.OnStream.order", order_nothing),
        ("fcdp_compile.plan.lane_clocks.LaneClocks.add", hold_nothing),
        ("tests.runtime.simulated_device.Stream.wait_event", lambda self, event: None),
    ],
)
def test_this_notices_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, name: str, damage: Callable[..., Any]
) -> None:
    assert any(got != expected for seed in range(20) for got, expected in run(seed)) is False
    monkeypatch.setattr(name, damage)
    assert any(got != expected for seed in range(20) for got, expected in run(seed))


def test_a_task_that_fails_leaves_what_it_had_begun_its_buffers() -> None:
    device = SimulatedDevice(0)
    lanes = Lanes(device, is_blocking=True)
    source, copied = Buffer(device), Memory()
    device.launch(partial(setattr, source.memory, "value", 5.0))

    def begin_and_fail(memory: Memory) -> None:
        device.launch(lambda: setattr(copied, "value", memory.value))
        raise RuntimeError("a peer is gone")

    pending = lanes.start(
        Lane.D2H,
        partial(begin_and_fail, source.memory),
        out=Buffer(device),
        reads=[source],
        name="",
    )
    del source
    with pytest.raises(RuntimeError, match="a peer is gone"):
        pending.wait()
    del pending
    gc.collect()
    device.synchronize_all()
    assert copied.value == 5


class Alive:
    """Counts the buffers that are still held."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._made: list[weakref.ref[Buffer]] = []

    def new(self) -> Any:
        buffer = Buffer(self._device)
        self._made.append(weakref.ref(buffer))
        return buffer

    def count(self) -> int:
        return sum(made() is not None for made in self._made)


def test_what_nobody_waits_for_is_let_go_with_what_comes_after_it() -> None:
    device = SimulatedDevice(0)
    lanes, alive = Lanes(device, is_blocking=False), Alive(device)
    for _ in range(100):
        lanes.start(Lane.INTER, lambda: None, out=alive.new(), reads=[], name="")
    assert alive.count() == 100
    lanes.start(Lane.INTER, lambda: None, out=alive.new(), reads=[], name="").wait()
    assert alive.count() == 0


@pytest.mark.parametrize("kernels", [0, 2, 1000], ids=["nothing has run", "behind", "all is done"])
@pytest.mark.parametrize("first", [Lane.H2D, Lane.INTER])
def test_what_is_alive_does_not_depend_on_how_far_the_device_is(first: Lane, kernels: int) -> None:
    """80 layers: layer k+2 is fetched and layer k+1 gathered from it while layer k computes."""
    device = SimulatedDevice(0)
    lanes, nodes, full = Lanes(device, is_blocking=False), Alive(device), Alive(device)
    fetched, spread = {}, {}
    most = (0, 0)

    def kernel() -> None:
        device.launch(lambda: None)

    for k in range(-2, 80):
        if k + 2 < 80:
            fetched[k + 2] = lanes.start(first, kernel, out=nodes.new(), reads=[], name="")
        if 0 <= k + 1 < 80:
            reads = [fetched.pop(k + 1)]
            spread[k + 1] = lanes.start(Lane.INTRA, kernel, out=full.new(), reads=reads, name="")
            del reads
        most = max(most[0], nodes.count()), max(most[1], full.count())
        if k >= 0:
            weights: Any = spread.pop(k).wait()
            kernel()
            del weights
        device.advance(kernels)
    assert most == (3, 2)
    assert (nodes.count(), full.count()) == (0, 0)


def test_gradients_are_let_go_with_the_last_wait_of_a_backward() -> None:
    device = SimulatedDevice(0)
    lanes, alive = Lanes(device, is_blocking=False), Alive(device)
    within = lanes.start(Lane.INTRA, lambda: None, out=alive.new(), reads=[alive.new()], name="")
    between = lanes.start(Lane.INTER, lambda: None, out=alive.new(), reads=[within], name="")
    del within
    between.wait()
    del between
    assert alive.count() == 0


# --- on a real device -------------------------------------------------------------------------------------

SLEEP_CYCLES = 400_000_000  # some 0.2 s
SIZE = 1 << 22


@pytest.fixture(params=[False, True], ids=["streams", "threads"])
def lanes(request: pytest.FixtureRequest) -> Lanes:
    return Lanes(Cuda(CUDA), is_blocking=request.param)


def sleep() -> None:
    torch.cuda._sleep(SLEEP_CYCLES)


@pytest.mark.gpu
@needs_cuda
class TestOnADevice:
    def test_lanes_come_after_compute_and_compute_after_lanes(self, lanes: Lanes) -> None:
        source, host = torch.zeros(SIZE, device=CUDA), torch.zeros(SIZE, pin_memory=True)
        back = torch.zeros(SIZE, device=CUDA)
        torch.cuda.synchronize()
        sleep()
        source.fill_(3)
        stored = lanes.start(
            Lane.D2H,
            partial(host.copy_, source, non_blocking=True),
            out=host,
            reads=[source],
            name="",
        )
        loaded = lanes.start(
            Lane.H2D,
            partial(back.copy_, host, non_blocking=True),
            out=back,
            reads=[stored],
            name="",
        )
        doubled = loaded.wait() * 2
        assert doubled.eq(6).all().item()

    def test_the_python_thread_never_waits_for_the_device(self, lanes: Lanes) -> None:
        out, source = torch.zeros(SIZE, device=CUDA), torch.ones(SIZE, device=CUDA)
        lanes.start(Lane.INTER, sleep, out=out, reads=[], name="").wait()
        torch.cuda.synchronize()
        sleep()
        pending = lanes.start(
            Lane.INTER, partial(out.copy_, source), out=out, reads=[source], name=""
        )
        pending = lanes.start(Lane.INTRA, sleep, out=out, reads=[pending], name="")
        pending.wait()
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert out.eq(1).all().item()

    def test_memory_is_not_used_again_before_a_lane_is_done_with_it(self, lanes: Lanes) -> None:
        out = torch.zeros(SIZE, device=CUDA)
        source = torch.full((SIZE,), 3.0, device=CUDA)

        def slow_copy(address: Tensor) -> None:
            sleep()
            out.copy_(address)

        lanes.start(Lane.INTER, partial(slow_copy, source), out=out, reads=[source], name="")
        del source
        for _ in range(4):
            torch.full((SIZE,), 7.0, device=CUDA)
        torch.cuda.synchronize()
        lanes.start(Lane.INTER, lambda: None, out=out, reads=[], name="").wait()
        assert out.eq(3).all().item()

    def test_memory_does_not_grow(self, lanes: Lanes) -> None:
        def step() -> None:
            source, out = torch.ones(SIZE, device=CUDA), torch.empty(SIZE, device=CUDA)
            first = lanes.start(
                Lane.INTER, partial(out.copy_, source), out=out, reads=[source], name=""
            )
            again = torch.empty(SIZE, device=CUDA)
            lanes.start(
                Lane.INTRA, partial(again.copy_, out), out=again, reads=[first], name=""
            ).wait()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for _ in range(50):
            step()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before[0] + 3 * 4 * SIZE
        assert torch.cuda.memory_reserved() <= before[1] + 3 * 4 * SIZE
