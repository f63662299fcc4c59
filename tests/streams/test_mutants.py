"""The check of streams notices every ordering that is removed from the runtime (`mutants`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.streams.mutants import Mutant, Trial, mutants
from tests.streams.programs import PROGRAMS, four_ranks

EXPLAINED = {
    "lanes.task_lanes.ThreadLane.join": "waits for threads at the interpreter's end (test_lanes_at_exit)",
    "lanes.task_lanes._Finisher.end": "the same",
    "lanes.task_lanes._run_here": "of a device without streams (test_lanes)",
}
"""Mutants that no simulated device can notice, with the reason."""

AT_ONCE = (
    "lanes.task_lanes.OnStream.order",
    "lanes.task_lanes.StreamLane._issue",
    "lanes.tasks.Pending.wait",
    "lanes.lanes.Lanes.start",
)
"""Functions that every program needs, also a program that fails."""

NOT_BY_ALL = ("done=None", "held without scratch")
"""What those functions do for some programs alone."""


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with four_ranks():
        yield


def _place(mutant: Mutant) -> str:
    return f"{mutant.module}.{mutant.function}"


@pytest.mark.rare
def test_what_every_program_needs_is_noticed() -> None:
    trial = Trial(["full", "a step that fails"], parts=())
    chosen = [m for m in mutants() if _place(m) in AT_ONCE and m.what not in NOT_BY_ALL]
    assert {_place(m) for m in chosen} == set(AT_ONCE)
    assert [str(m) for m in chosen if not trial.caught(m)] == []


@pytest.mark.rare
def test_nothing_can_be_taken_out_unnoticed() -> None:
    trial = Trial(list(PROGRAMS))
    # Without streams a task's thread keeps the order itself; test_lanes checks that.
    on_streams = (
        m for m in mutants() if "done=None" not in m.what or _place(m) != "lanes.lanes.Lanes.start"
    )
    chosen = [m for m in on_streams if _place(m) not in EXPLAINED]
    assert {_place(m) for m in mutants()} > set(EXPLAINED)
    assert [str(m) for m in chosen if not trial.caught(m)] == []
