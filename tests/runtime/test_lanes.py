"""Lanes on threads: order, chains, errors, the buffers they hold and for how long, and their end."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from builders_plan import make_bucket
from fcdp_compile.devices import Cpu
from fcdp_compile.plan import Kind, Lane
from fcdp_compile.runtime.lanes.lanes import Lanes, range_name, tensor_of
from fcdp_compile.runtime.lanes.tasks import Begun, Pending
from fcdp_compile.torch_compat import every_thread
from tests.runtime.on_lanes import LONG_S, Gate, start

CPU = torch.device("cpu")
ALL = (Lane.INTER, Lane.INTRA, Lane.H2D, Lane.D2H)


@pytest.fixture
def lanes() -> Lanes:
    return Lanes(Cpu(), is_blocking=True)


def test_each_thread_uses_the_device_of_its_rank() -> None:
    """Also the thread that finishes what another has begun; torch starts each with the first device."""
    entered = list[str]()

    class Second(Cpu):
        def enter_thread(self) -> None:
            entered.append(threading.current_thread().name)

    lanes = Lanes(Second(), is_blocking=True)
    start(lanes, Lane.INTER, lambda: Begun(lambda: None)).wait()
    assert entered == ["fcdp inter", "fcdp inter end"]


class TestOrder:
    def test_a_lane_keeps_the_order_of_its_tasks(self, lanes: Lanes) -> None:
        gate, done = Gate(), list[int]()
        start(lanes, Lane.INTER, gate)
        started = [start(lanes, Lane.INTER, lambda i=i: done.append(i)) for i in range(50)]
        assert done == []
        gate.open()
        started[-1].wait()
        assert done == list(range(50))

    def test_starting_does_not_wait(self, lanes: Lanes) -> None:
        gate = Gate()
        pending = start(lanes, Lane.INTER, gate)
        gate.wait_until_begun()
        gate.open()
        pending.wait()

    def test_lanes_run_beside_each_other(self, lanes: Lanes) -> None:
        gates = {lane: Gate() for lane in ALL}
        started = [start(lanes, lane, gate) for lane, gate in gates.items()]
        for gate in gates.values():
            gate.wait_until_begun()
        for gate in gates.values():
            gate.open()
        for pending in started:
            pending.wait()

    def test_a_task_runs_after_those_whose_results_it_reads(self, lanes: Lanes) -> None:
        """Over every lane and back, as a gather that is stored, loaded and spread."""
        gate = Gate()
        first = torch.zeros(3)

        def fill() -> None:
            gate()
            first.fill_(1)

        pending = start(lanes, Lane.INTER, fill, out=first)
        for lane in [*ALL, *ALL]:
            before, out = pending.tensor, torch.full((3,), float("nan"))
            pending = start(lanes, lane, lambda b=before, o=out: o.copy_(b + 1), pending, out=out)
        gate.open()
        assert pending.wait().tolist() == [9.0] * 3

    def test_a_result_may_be_read_by_several_and_waited_for_besides(self, lanes: Lanes) -> None:
        gate, source = Gate(), torch.zeros(1)

        def fill() -> None:
            gate()
            source.fill_(5)

        pending = start(lanes, Lane.INTER, fill, out=source)
        outs = [torch.zeros(1) for _ in ALL]
        readers = [
            start(lanes, lane, lambda o=o: o.copy_(source), pending, out=o)
            for lane, o in zip(ALL, outs, strict=True)
        ]
        gate.open()
        assert pending.wait().item() == 5
        assert [r.wait().item() for r in readers] == [5] * 4

    def test_buffers_that_are_there_already_are_waited_for_by_nobody(self, lanes: Lanes) -> None:
        there, tensor = Pending(torch.ones(1)), torch.ones(1)
        out = torch.zeros(1)
        pending = start(
            lanes, Lane.D2H, lambda: out.copy_(tensor_of(there) + tensor), there, tensor, out=out
        )
        assert pending.wait().item() == 2

    def test_models_have_lanes_of_their_own(self) -> None:
        one, other, gate = (
            Lanes(Cpu(), is_blocking=True),
            Lanes(Cpu(), is_blocking=True),
            Gate(),
        )
        blocked = start(one, Lane.INTER, gate)
        start(other, Lane.INTER, lambda: None).wait()
        gate.open()
        blocked.wait()


class TestErrors:
    @staticmethod
    def fail() -> None:
        raise RuntimeError("a peer is gone")

    def test_everybody_who_waits_learns_of_it(self, lanes: Lanes) -> None:
        ran = list[str]()
        failed = start(lanes, Lane.INTER, self.fail)
        reads = start(lanes, Lane.INTRA, lambda: ran.append("reads"), failed)
        reads_that = start(lanes, Lane.D2H, lambda: ran.append("reads that"), reads)
        for pending in (reads_that, failed, reads):
            with pytest.raises(RuntimeError, match="a peer is gone"):
                pending.wait()
        assert ran == []

    def test_the_lanes_go_on(self, lanes: Lanes) -> None:
        failed = start(lanes, Lane.INTER, self.fail)
        start(lanes, Lane.INTRA, lambda: None, failed)
        for lane in (Lane.INTER, Lane.INTRA):
            out = torch.zeros(1)
            assert start(lanes, lane, lambda o=out: o.fill_(3), out=out).wait().item() == 3

    def test_one_that_nobody_waits_for_is_forgotten(
        self, lanes: Lanes, capfd: pytest.CaptureFixture[str]
    ) -> None:
        start(lanes, Lane.INTER, self.fail)
        start(lanes, Lane.INTER, lambda: None).wait()
        gc.collect()
        assert capfd.readouterr().err == ""

    def test_the_exit_of_a_task_does_not_end_its_lane(self, lanes: Lanes) -> None:
        pending = start(lanes, Lane.INTER, sys.exit)
        with pytest.raises(SystemExit):
            pending.wait()
        start(lanes, Lane.INTER, lambda: None).wait()

    def test_it_holds_no_buffers(self, lanes: Lanes) -> None:
        """Else the buffers of a failed step would live until the garbage collector runs."""
        read, out = torch.ones(2), torch.zeros(2)
        alive = [weakref.ref(read), weakref.ref(out)]
        gc.disable()
        try:
            failed = start(lanes, Lane.INTER, partial(self.fail_with, read), read, out=out)
            reads = start(lanes, Lane.INTRA, lambda: None, failed)
            del failed, read, out
            with pytest.raises(RuntimeError, match="2 elements"):
                reads.wait()
            del reads
            assert [a() for a in alive] == [None, None]
        finally:
            gc.enable()

    @staticmethod
    def fail_with(read: Tensor) -> None:
        raise RuntimeError(f"{read.numel()} elements")


class TestBegun:
    """Tasks that only begin work, and leave the rest to another thread."""

    def test_the_next_begins_before_the_first_is_finished(self, lanes: Lanes) -> None:
        first, second, order = Gate(), Gate(), list[str]()
        started = [
            start(lanes, Lane.INTER, lambda: order.append("1") or Begun(first)),
            start(lanes, Lane.INTER, lambda: order.append("2") or Begun(second)),
        ]
        first.wait_until_begun()
        start(lanes, Lane.INTER, lambda: None).wait()
        assert order == ["1", "2"]
        first.open()
        second.wait_until_begun()
        second.open()
        for pending in started:
            pending.wait()

    def test_not_many_are_on_their_way_at_once(self, lanes: Lanes) -> None:
        gate, begun, third = Gate(), list[int](), Gate()
        for i in range(2):
            start(lanes, Lane.INTER, lambda i=i: begun.append(i) or Begun(gate))
        start(lanes, Lane.INTER, lambda: begun.append(2) or third() or Begun(gate))
        last = start(lanes, Lane.INTER, lambda: begun.append(3))
        third.wait_until_begun()
        third.open()
        with pytest.raises(TimeoutError):
            last.done._future.result(timeout=0.2)
        gate.open()
        last.wait()
        assert begun == [0, 1, 2, 3]

    def test_who_waits_waits_for_the_finish(self, lanes: Lanes) -> None:
        gate, out, seen = Gate(), torch.zeros(1), torch.zeros(1)

        def finish() -> None:
            gate()
            out.fill_(7)

        pending = start(lanes, Lane.INTER, lambda: Begun(finish), out=out)
        reader = start(lanes, Lane.INTRA, lambda: seen.copy_(out), pending, out=seen)
        gate.open()
        assert (reader.wait().item(), pending.wait().item()) == (7, 7)

    @pytest.mark.parametrize("fails", [False, True])
    def test_buffers_are_held_until_then_and_no_longer(self, lanes: Lanes, fails: bool) -> None:
        for _ in range(5):
            gate, read = Gate(), torch.ones(2)
            alive = weakref.ref(read)
            finish = partial(self.finish, read, gate, fails)
            pending = start(lanes, Lane.INTER, lambda f=finish: Begun(f), read)
            del read, finish
            gate.wait_until_begun()
            gc.collect()
            assert alive() is not None
            gate.open()
            with pytest.raises(RuntimeError, match="gone") if fails else nullcontext():
                pending.wait()
            assert alive() is None

    @staticmethod
    def finish(read: Tensor, gate: Gate, fails: bool) -> None:
        gate()
        read.add_(1)
        if fails:
            raise RuntimeError("a peer is gone")

    def test_a_failure_reaches_who_waits_and_the_lane_goes_on(self, lanes: Lanes) -> None:
        failed = start(lanes, Lane.INTER, lambda: Begun(TestErrors.fail))
        with pytest.raises(RuntimeError, match="a peer is gone"):
            failed.wait()
        out = torch.zeros(1)
        follows = start(lanes, Lane.INTER, lambda: Begun(lambda: out.fill_(2)), out=out)
        assert follows.wait().item() == 2

    def test_it_ends_with_its_owner_and_finishes_first(self, new_threads) -> None:
        lanes, gate = Lanes(Cpu(), is_blocking=True), Gate()
        out = torch.zeros(1)
        pending = start(lanes, Lane.INTER, lambda: Begun(lambda: gate() or out.fill_(4)), out=out)
        gate.wait_until_begun()
        threads = new_threads()
        assert [t.name for t in threads] == ["fcdp inter", "fcdp inter end"]
        del lanes
        gate.open()
        assert pending.wait().item() == 4
        assert ended(threads)


class TestBuffers:
    def test_they_are_held_until_the_task_is_done_though_nobody_waits(self, lanes: Lanes) -> None:
        gate = Gate()
        start(lanes, Lane.INTER, gate)
        out, read = torch.zeros(2), torch.ones(2)
        alive = [weakref.ref(out), weakref.ref(read)]
        start(lanes, Lane.INTER, lambda: None, read, out=out)
        del out, read
        gc.collect()
        assert None not in [a() for a in alive]
        gate.open()
        start(lanes, Lane.INTER, lambda: None).wait()
        assert [a() for a in alive] == [None, None]

    def test_those_of_a_pending_result_are_too(self, lanes: Lanes) -> None:
        gate, read = Gate(), torch.ones(2)
        pending = start(lanes, Lane.INTER, gate)
        alive = weakref.ref(pending.tensor)
        reader = start(lanes, Lane.INTRA, lambda: None, pending, read)
        del pending
        gc.collect()
        assert alive() is not None
        gate.open()
        reader.wait()
        assert alive() is None

    def test_they_are_gone_when_a_waiter_goes_on(self, lanes: Lanes) -> None:
        for _ in range(300):
            sent, out = torch.ones(2), torch.zeros(2)
            alive = weakref.ref(sent)
            pending = start(lanes, Lane.INTER, lambda o=out, s=sent: o.copy_(s), sent, out=out)
            del sent
            pending.wait()
            assert alive() is None
            alive = weakref.ref(out)
            del pending, out
            assert alive() is None


def ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(LONG_S)
    return not any(t.is_alive() for t in threads)


@pytest.fixture
def new_threads() -> Callable[[], list[threading.Thread]]:
    """Returns the lanes' threads that were started since the test began."""
    before = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t not in before]


class TestThreads:
    def test_one_for_each_lane_that_was_used(self, lanes: Lanes, new_threads) -> None:
        assert new_threads() == []
        for lane in [*ALL, *ALL]:
            start(lanes, lane, lambda: None)
        assert [t.name for t in new_threads()] == [f"fcdp {lane.value}" for lane in ALL]
        assert all(t.daemon for t in new_threads())

    def test_they_end_with_their_owner(self, new_threads) -> None:
        lanes = Lanes(Cpu(), is_blocking=True)
        for lane in ALL:
            start(lanes, lane, lambda: None)
        threads = new_threads()
        assert len(threads) == 4
        del lanes
        assert ended(threads)

    def test_they_finish_what_they_were_given(self, new_threads) -> None:
        lanes, gate = Lanes(Cpu(), is_blocking=True), Gate()
        first = start(lanes, Lane.INTER, gate)
        out = torch.zeros(1)
        last = start(lanes, Lane.INTRA, lambda: out.fill_(4), first, out=out)
        alive = weakref.ref(lanes)
        threads = new_threads()
        del lanes
        assert alive() is None  # no task holds the model that it is for
        gate.open()
        assert last.wait().item() == 4
        assert ended(threads)

    def test_tasks_record_no_gradients(self, lanes: Lanes) -> None:
        weight, out = torch.ones(2, requires_grad=True), torch.zeros(2)
        with torch.enable_grad():
            result = start(lanes, Lane.INTER, lambda: out.copy_(weight), out=out).wait()
        assert not result.requires_grad


def test_evaluation_and_training_share_lanes(lanes: Lanes) -> None:
    """Buffers are made outside of inference mode; tensors to read may come from inference mode."""
    out, again = torch.zeros(2), torch.zeros(2)
    with torch.inference_mode():
        read = torch.ones(2) + 1
        pending = start(lanes, Lane.INTER, lambda: out.copy_(read), read, out=out)
        start(lanes, Lane.INTRA, lambda: again.copy_(out), pending, out=again).wait()
    assert again.tolist() == [2, 2]
    start(lanes, Lane.INTER, lambda: out.fill_(7), out=out).wait()
    weight = torch.ones(2, requires_grad=True)
    (weight * out).sum().backward()
    assert weight.grad.tolist() == [7, 7]


class TestProfiler:
    BUCKET = make_bucket(0, [("w", (4, 4))], dtype=("float32", 4))

    def test_steps_are_named_ranges_on_the_thread_of_their_lane(self, lanes: Lanes) -> None:
        lanes_of = {Kind.STORE: Lane.D2H, Kind.LOAD: Lane.H2D}
        with profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread()) as p:
            for kind, lane in lanes_of.items():
                name = range_name(kind, self.BUCKET)
                lanes.start(lane, lambda: None, out=torch.zeros(1), reads=[], name=name).wait()
        ranges = {e.name: e.thread for e in p.events() if e.name.startswith("fcdp::")}
        assert set(ranges) == {"fcdp::store 0", "fcdp::load 0"}
        assert len(set(ranges.values())) == 2

    def test_nothing_is_named_while_nobody_looks(
        self, lanes: Lanes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(name: str) -> None:
            raise AssertionError(f"a range {name}")

        monkeypatch.setattr("fcdp_compile.runtime.lanes.lanes.record_function", refuse)
        start(lanes, Lane.INTER, lambda: None).wait()
