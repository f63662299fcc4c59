"""Checks that hold for every schedule, computed from the order of the nodes alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch.fx import Node

from builders_graph import calls
from fcdp_compile import ops
from fcdp_compile.passes.schedule import in_flight_bytes
from tests.passes.in_flight import largest_reduction, least, nbytes, peak
from tests.passes.scheduled import (
    GATHERS,
    REDUCTIONS,
    SPREADS,
    Scheduled,
    is_compute,
    last_wait,
    users,
)
from tests.passes.storages import storages

STARTS = (*GATHERS, *REDUCTIONS, ops.store)


def check_nodes(done: Scheduled) -> None:
    """Nodes and inputs are unchanged, each node comes after its inputs, and compute keeps its order."""
    done.gm.graph.lint()
    after = done.after
    added = [n for n in after if n not in done.inputs]
    assert Counter([*done.before, *added]) == Counter(after)
    for node in added:
        assert node.target is ops.wait
        assert node.all_input_nodes[0].target in (ops.collect, ops.intra_reduce_scatter)
    assert {n: n.all_input_nodes for n in done.before} == done.inputs
    at = {n: i for i, n in enumerate(after)}
    assert all(at[i] < at[n] for n in after for i in n.all_input_nodes)
    assert [n for n in after if is_compute(n)] == [n for n in done.before if is_compute(n)]
    inputs = [n for n in after if n.op == "placeholder" or n.target is ops.check]
    assert after[: len(inputs)] == inputs
    assert after[-1].op == "output"


def check_waits(after: list[Node]) -> None:
    """Every started step is waited for, directly (at most once) or by a wait for a step that continues it."""
    for start in (n for n in after if n.target in STARTS):
        waits = users(start, ops.wait)
        assert len(waits) <= 1
        assert last_wait(start) in after  # raises unless the last step of the chain has one wait
        if users(start, *GATHERS):
            assert not waits
    for store in (n for n in after if n.target is ops.store):
        assert len(users(store, ops.wait)) == 1
    at = {n: i for i, n in enumerate(after)}
    for wait in (n for n in after if n.target is ops.wait):
        onward = users(wait.all_input_nodes[0], *REDUCTIONS)
        assert all(at[wait] < at[last_wait(n)] for n in onward)  # else this wait is superfluous


def check_frees(done: Scheduled) -> None:
    """Every gathered buffer is freed once, after all readers of its memory, unless it is returned."""
    after = done.after
    at = {n: i for i, n in enumerate(after)}
    memory = storages(done.gm)
    returned = {memory.get(n) for n in after[-1].all_input_nodes}
    for start in (n for n in after if n.target in GATHERS and not users(n, *SPREADS)):
        wait = last_wait(start)
        frees = [n for n in after if n.target is ops.free and n.args == (wait,)]
        assert len(frees) == (memory[wait] not in returned)
        readers = [
            n for n in after if any(memory.get(i) == memory[wait] for i in n.all_input_nodes)
        ]
        assert all(at[n] <= at[f] for n in readers for f in frees)
    assert len(calls(done.gm, ops.free)) <= len(calls(done.gm, ops.wait))


def runs(after: list[Node]) -> Iterator[list[Node]]:
    """Yields the explicit nodes between two pieces of compute."""
    run: list[Node] = []
    for node in after:
        if is_compute(node):
            yield run
            run = []
        else:
            run.append(node)
    yield run


def check_order(after: list[Node]) -> None:
    """Between two pieces of compute the order is: frees, gathers, reductions, and then the wait."""
    for run in runs(after):
        reductions = [i for i, n in enumerate(run) if n.target in REDUCTIONS]
        gathers = [i for i, n in enumerate(run) if n.target in GATHERS]
        if reductions and gathers:
            assert max(gathers) < min(reductions)


def check_budget(done: Scheduled) -> None:
    most = peak(done.after, done.ctx)
    assert in_flight_bytes(done.gm) == most
    granted = least(done.before, done.ctx)
    if done.ctx.in_flight_bytes is not None:
        assert most <= max(done.ctx.in_flight_bytes, granted)
    else:
        made = [nbytes(last_wait(n)) for n in done.after if n.target in GATHERS]
        room = 4 * max(made, default=0) + largest_reduction(done.before, done.ctx)
        assert most <= granted + room


def check(done: Scheduled) -> None:
    check_nodes(done)
    check_waits(done.after)
    check_frees(done)
    check_order(done.after)
    check_budget(done)
