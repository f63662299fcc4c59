"""Lanes at the end of the interpreter: mostly in processes of their own."""

from __future__ import annotations

import atexit
import gc
import subprocess
import sys
import textwrap
from concurrent.futures import CancelledError

import pytest

from fcdp_compile.devices import Cpu
from fcdp_compile.plan import Lane
from fcdp_compile.runtime.lanes.lanes import Lanes
from tests.runtime.on_lanes import Gate, start


def run(script: str) -> subprocess.CompletedProcess[str]:
    whole = """
        import sys, threading, time, torch
        from fcdp_compile.devices import Cpu
        from fcdp_compile.plan import Lane
        from fcdp_compile.runtime.lanes.lanes import Lanes
        lanes, out = Lanes(Cpu(), is_blocking=True), torch.zeros(1)
        begun = threading.Event()

        def blocked():
            begun.set()
            assert lanes.exiting.wait(300)
            print("gave up", flush=True)
            raise RuntimeError("exiting")
    """
    text = textwrap.dedent(whole) + textwrap.dedent(script)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.slow
def test_an_idle_lane_is_no_hindrance() -> None:
    done = run("""
        import atexit

        @atexit.register
        def look():
            for thread in threading.enumerate():
                if thread.daemon:
                    thread.join(10)
                    print(thread.name * thread.is_alive(), end="")

        lanes = Lanes(Cpu(), is_blocking=True)  # after `look`, so that it gives up before
        lanes.start(Lane.INTER, lambda: None, out=out, reads=[], name="x").wait()
        sys.exit(3)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_blocked_tasks_give_up_and_others_never_begin() -> None:
    done = run("""
        first = lanes.start(Lane.INTER, blocked, out=out, reads=[], name="x")
        lanes.start(Lane.INTER, lambda: print("began"), out=out, reads=[], name="x")
        lanes.start(Lane.INTRA, lambda: print("began"), out=out, reads=[first], name="x")
        begun.wait()
        raise ValueError("the user's")
    """)
    assert done.returncode == 1
    assert done.stdout == "gave up\n"
    assert done.stderr.endswith("ValueError: the user's\n")


@pytest.mark.slow
def test_what_has_begun_gives_up_too() -> None:
    done = run("""
        from fcdp_compile.runtime.lanes.tasks import Begun

        for _ in range(3):
            lanes.start(Lane.INTER, lambda: Begun(blocked), out=out, reads=[], name="x")
        last = lanes.start(Lane.INTER, lambda: print("began"), out=out, reads=[], name="x")
        begun.wait()
        time.sleep(0.2)  # until the third has begun
        sys.exit(3)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (3, "gave up\n" * 3, "")


@pytest.mark.slow
def test_what_takes_its_time_is_waited_for() -> None:
    """The task runs in C++; its thread must not come back to Python after the interpreter has ended."""
    done = run("""
        matrix = torch.rand(1500, 1500)

        def busy():
            begun.set()
            for _ in range(4):
                torch.mm(matrix, matrix)
            print("done", flush=True)

        lanes.start(Lane.INTER, busy, out=out, reads=[], name="x")
        begun.wait()
        sys.exit(3)
    """)
    assert (done.returncode, done.stdout, done.stderr) == (3, "done\n", "")


def test_what_is_cancelled_says_so() -> None:
    lanes, gate = Lanes(Cpu(), is_blocking=True), Gate()
    first = start(lanes, Lane.INTER, gate)
    gate.wait_until_begun()
    cancelled = start(lanes, Lane.INTER, lambda: None)
    follows = start(lanes, Lane.INTRA, lambda: None, cancelled)
    lanes.exiting.set()
    gate.open()
    first.wait()
    for pending in (cancelled, follows):
        with pytest.raises(CancelledError):
            pending.wait()


def test_lanes_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    lanes = Lanes(Cpu(), is_blocking=True)
    assert len(registered) == 1
    del lanes
    gc.collect()
    assert registered == []
