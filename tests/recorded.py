"""Checks that hold for the times of any run, from the steps alone."""

from __future__ import annotations

from collections.abc import Sequence

from fcdp_compile.plan import Kind, Lane, Step
from fcdp_compile.plan.recording import RecordedRun

IN_FLIGHT = 3
"""Most collectives at once on a lane with a thread: one is being finished, one has begun, the next begins."""


def assert_causal(run: RecordedRun, steps: Sequence[Step]) -> None:
    """No step starts before the steps it waits for have ended; a wait may start before, but ends after."""
    assert len(run.starts_s) == len(run.ends_s) == len(steps)
    for step in steps:
        times_s = run.ends_s if step.kind is Kind.WAIT else run.starts_s
        for i in step.waits:
            assert run.ends_s[i] <= times_s[step.index], f"{step} and {steps[i]} in {run}"


def assert_in_turn(run: RecordedRun, steps: Sequence[Step], *, in_flight: int = IN_FLIGHT) -> None:
    """Steps of a lane begin and end in order; only collectives overlap, at most `in_flight` at once."""
    for lane in Lane:
        spans = [
            (run.starts_s[s.index], run.ends_s[s.index])
            for s in steps
            if s.lane is lane and run.starts_s[s.index] < run.ends_s[s.index]
        ]
        most = in_flight if lane in (Lane.INTER, Lane.INTRA) else 1
        assert spans == sorted(spans), f"{lane} in {run}"
        assert [end for _, end in spans] == sorted(end for _, end in spans), f"{lane} in {run}"
        for (_, end), (start, _) in zip(spans, spans[most:], strict=False):
            assert end <= start, f"more than {most} at once on {lane} in {run}"
