"""The bytes moved, in all and in the last step."""

from __future__ import annotations

from fcdp_compile.plan import Kind
from fcdp_compile.runtime.collectives.counters import AGREE, Counters


def test_totals_by_kind() -> None:
    counters = Counters()
    counters.add(Kind.LOAD, 3)
    counters.add(Kind.LOAD, 4)
    counters.add(AGREE, 5)
    counters.add(Kind.STORE, 0)
    assert counters.sent == {"load": 7, "agree": 5, "store": 0}
    assert counters.calls == {"load": 2, "agree": 1, "store": 1}


class Optimizer:
    """An optimizer; the counters tell optimizers apart by identity."""


A, B = Optimizer(), Optimizer()


def test_the_last_step_is_what_came_since_the_one_before() -> None:
    counters = Counters()
    counters.add(Kind.LOAD, 3)
    counters.add(Kind.STORE, 9)
    counters.end_step(A)
    assert (counters.last_step, counters.steps) == ({"load": 3, "store": 9}, 1)
    counters.add(Kind.LOAD, 4)
    assert counters.last_step == {"load": 3, "store": 9}
    counters.end_step(A)
    assert (counters.last_step, counters.steps) == ({"load": 4, "store": 0}, 2)
    assert counters.sent == {"load": 7, "store": 9}


def test_a_second_optimizer_ends_no_step_of_its_own() -> None:
    counters = Counters()
    for steps in (1, 2, 3):
        counters.add(Kind.LOAD, 3)
        counters.end_step(A)
        counters.end_step(B)
        assert (counters.last_step, counters.steps) == ({"load": 3}, steps)


def test_steps_that_move_nothing_count_too() -> None:
    counters = Counters()
    for steps in (1, 2, 3):
        counters.end_step(A)
        counters.end_step(B)
        assert counters.steps == steps
