"""Transfers start early and within the budget, and nothing else changes.

What holds for every schedule is computed here from the order of the nodes alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule, Node

from builders_graph import (
    GraphBuilder,
    Lowered,
    Shape,
    Where,
    aten,
    calls,
    lower_pair,
    lower_toy,
    make_context,
    make_specs,
    toy_backward,
    toy_forward,
)
from builders_plan import shapes
from fcdp_compile import ops
from fcdp_compile.passes.context import META, Packing, PassContext
from fcdp_compile.passes.schedule import in_flight_bytes, schedule
from fcdp_compile.plan import Direction, Variant
from tests.passes.storages import storages

GATHERS = (ops.load, ops.inter_all_gather, ops.intra_all_gather)
REDUCTIONS = (ops.intra_reduce_scatter, ops.inter_reduce_scatter)
STARTS = (*GATHERS, *REDUCTIONS, ops.store)
BOOKKEEPING = (ops.stamp, ops.check)

FORWARD = (Direction.FORWARD, Variant.COLD)
BACKWARD = (Direction.BACKWARD, Variant.COLD)

GENEROUS = 1 << 60

quick = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# --- graphs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, how it is used and how it is sharded; ranks differ in their place alone."""

    params: dict[str, Shape]
    nodes: int
    ranks_per_node: int
    strategy: str
    frozen: tuple[str, ...]
    uses: tuple[str, ...]
    backward_uses: tuple[str, ...]
    returned: tuple[str, ...]
    viewed: bool
    bucket_bytes: int
    budget: int | None

    def lower(self, node: int = 0, place: int = 0) -> Lowered:
        """Every graph of one rank, just in time."""
        where = Where(nodes=self.nodes, ranks_per_node=self.ranks_per_node, node=node, place=place)
        specs = make_specs(self.params, where)
        ctx = make_context(
            specs,
            where,
            strategy=self.strategy,
            frozen=self.frozen,
            bucket_bytes=self.bucket_bytes,
        )
        return lower_pair(
            toy_forward(specs, viewed=self.viewed, uses=self.uses, returned=self.returned),
            toy_backward(specs, viewed=self.viewed, frozen=self.frozen, uses=self.backward_uses),
            replace(ctx, in_flight_bytes=self.budget),
            num_fwd_outputs=1 + len(self.returned),
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Uses in any order: parameters read once or often, close together or far apart, some returned."""
    drawn = draw(st.lists(shapes, min_size=1, max_size=6))
    names = [f"p{i}" for i in range(len(drawn))]
    some = st.lists(st.sampled_from(names), max_size=5)
    return Case(
        params=dict(zip(names, drawn, strict=True)),
        nodes=draw(st.integers(1, 3)),
        ranks_per_node=draw(st.integers(1, 3)),
        strategy=draw(st.sampled_from(["zero3", "zero++", "fcdp"])),
        frozen=tuple(draw(some)),
        uses=tuple(draw(st.permutations([*names, *draw(some)]))),
        backward_uses=tuple(draw(st.permutations([*names, *draw(some)]))),
        returned=tuple(dict.fromkeys(draw(st.just([]) | some))),
        viewed=draw(st.booleans()),
        bucket_bytes=draw(st.sampled_from([1, 200, 2000, 1 << 20])),
        budget=draw(st.sampled_from([None, 1, 1000, 20_000, GENEROUS]) | st.integers(1, 50_000)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A graph before and after: the same nodes, but for waits that were added."""

    gm: GraphModule
    ctx: PassContext
    before: list[Node]
    inputs: dict[Node, list[Node]]

    @property
    def after(self) -> list[Node]:
        return list(self.gm.graph.nodes)


def scheduled(gm: GraphModule, ctx: PassContext) -> Scheduled:
    before = list(gm.graph.nodes)
    inputs = {n: list(n.all_input_nodes) for n in before}
    return Scheduled(gm=schedule(gm, ctx), ctx=ctx, before=before, inputs=inputs)


def is_compute(node: Node) -> bool:
    return (
        node.op == "call_function"
        and node.target not in ops.EXPLICIT
        and not isinstance(node.meta.get(META), Packing)
    )


# --- bytes in flight, by definition -----------------------------------------------------------------------


def nbytes(node: Node) -> int:
    return node.meta["val"].numel() * node.meta["val"].dtype.itemsize


def users(node: Node, *targets: Callable[..., Any]) -> list[Node]:
    return [u for u in node.users if u.target in targets]


def last_wait(start: Node) -> Node:
    """The wait that a started step is covered by: its own, or that of what continues it."""
    onward = users(start, *GATHERS, *REDUCTIONS)
    if onward:
        return last_wait(onward[0])
    (wait,) = users(start, ops.wait)
    return wait


def gathers_in_flight(nodes: list[Node], ctx: PassContext, *, stores: bool) -> list[int]:
    """Bytes of node shards and full parameters after each node.  stores: whether these keep them too."""
    at = {n: i for i, n in enumerate(nodes)}
    alive = [0] * len(nodes)
    for start in (n for n in nodes if n.target in GATHERS):
        wait = last_wait(start)
        made = nbytes(wait)
        if users(start, ops.intra_all_gather):
            made //= ctx.ranks_per_node
        ends = [at[f] for f in users(wait, ops.free)] or [len(nodes)]
        chain = [start, *start.all_input_nodes, *start.users]
        if stores:
            ends += [at[w] for n in chain for s in users(n, ops.store) for w in s.users]
        add(alive, at[start], max(ends), made)
    return alive


def gradients_in_flight(nodes: list[Node], ctx: PassContext) -> list[int]:
    """Bytes of gradients on their way after each node."""
    at = {n: i for i, n in enumerate(nodes)}
    alive = [0] * len(nodes)
    for start in (n for n in nodes if n.target in REDUCTIONS):
        (given,) = start.all_input_nodes
        if given.target in REDUCTIONS:
            continue
        end = at[last_wait(start)]
        read = min([at[w] for w in users(start, ops.wait)], default=end)
        add(alive, at[start], read, nbytes(given))
        add(alive, at[start], end, left_of(start, ctx))
    return alive


def left_of(start: Node, ctx: PassContext) -> int:
    """Bytes of what the first half of a reduction leaves."""
    ranks = ctx.ranks_per_node if start.target is ops.intra_reduce_scatter else ctx.nodes
    return nbytes(start.all_input_nodes[0]) // ranks


def add(alive: list[int], start: int, end: int, size: int) -> None:
    assert start < end
    for i in range(start, end):
        alive[i] += size


def peak(nodes: list[Node], ctx: PassContext) -> int:
    gathers = gathers_in_flight(nodes, ctx, stores=True)
    gradients = gradients_in_flight(nodes, ctx)
    return max(a + b for a, b in zip(gathers, gradients, strict=True))


def largest_reduction(nodes: list[Node], ctx: PassContext) -> int:
    firsts = [
        n for n in nodes if n.target in REDUCTIONS and n.all_input_nodes[0].target not in REDUCTIONS
    ]
    return max((nbytes(n.all_input_nodes[0]) + left_of(n, ctx) for n in firsts), default=0)


def least(before: list[Node], ctx: PassContext) -> int:
    """What is granted in any case: gathers just in time, and one reduction."""
    return max(gathers_in_flight(before, ctx, stores=False)) + largest_reduction(before, ctx)


# --- what holds for every schedule ------------------------------------------------------------------------


def check_nodes(done: Scheduled) -> None:
    """The same nodes with the same inputs, each after its inputs, compute in the order it had."""
    done.gm.graph.lint()
    after = done.after
    added = [n for n in after if n not in done.inputs]
    assert Counter([*done.before, *added]) == Counter(after)
    for node in added:
        assert node.target is ops.wait
        assert node.all_input_nodes[0].target is ops.intra_reduce_scatter
    assert {n: n.all_input_nodes for n in done.before} == done.inputs
    at = {n: i for i, n in enumerate(after)}
    assert all(at[i] < at[n] for n in after for i in n.all_input_nodes)
    assert [n for n in after if is_compute(n)] == [n for n in done.before if is_compute(n)]
    inputs = [n for n in after if n.op == "placeholder" or n.target is ops.check]
    assert after[: len(inputs)] == inputs
    assert after[-1].op == "output"


def check_waits(after: list[Node]) -> None:
    """Every started step is waited for, by itself or by what continues it, and never twice."""
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
        assert all(at[wait] < at[last_wait(n)] for n in onward)  # else it is one too many


def check_frees(done: Scheduled) -> None:
    """Every gathered buffer is freed once, after whatever reads its memory, unless it is returned."""
    after = done.after
    at = {n: i for i, n in enumerate(after)}
    memory = storages(done.gm)
    returned = {memory.get(n) for n in after[-1].all_input_nodes}
    for start in (n for n in after if n.target in GATHERS and not users(n, ops.intra_all_gather)):
        wait = last_wait(start)
        frees = [n for n in after if n.target is ops.free and n.args == (wait,)]
        assert len(frees) == (memory[wait] not in returned)
        readers = [
            n for n in after if any(memory.get(i) == memory[wait] for i in n.all_input_nodes)
        ]
        assert all(at[n] <= at[f] for n in readers for f in frees)
    assert len(calls(done.gm, ops.free)) <= len(calls(done.gm, ops.wait))


def runs(after: list[Node]) -> Iterator[list[Node]]:
    """What stands between two pieces of compute."""
    run: list[Node] = []
    for node in after:
        if is_compute(node):
            yield run
            run = []
        else:
            run.append(node)
    yield run


def check_order(after: list[Node]) -> None:
    """Where several things happen at once: frees, gathers, reductions, and then the wait."""
    for run in runs(after):
        reductions = [i for i, n in enumerate(run) if n.target in REDUCTIONS]
        gathers = [i for i, n in enumerate(run) if n.target in GATHERS]
        if reductions and gathers:
            assert max(gathers) < min(reductions)


def check_budget(done: Scheduled) -> None:
    most = peak(done.after, done.ctx)
    assert in_flight_bytes(done.gm, done.ctx) == most
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


@quick
@given(cases())
def test_invariants(case: Case) -> None:
    made = case.lower()
    for key, gm in made.graphs.items():
        assert in_flight_bytes(gm, made.contexts[key]) == peak(
            list(gm.graph.nodes), made.contexts[key]
        )
        check(scheduled(gm, made.contexts[key]))


@settings(quick, max_examples=10)
@given(cases())
def test_all_ranks_communicate_in_the_same_order_and_twice_the_same(case: Case) -> None:
    def texts(node: int, place: int) -> tuple[list[object], list[str]]:
        made = case.lower(node, place)
        done = [schedule(gm, made.contexts[key]) for key, gm in made.graphs.items()]
        return [communication(gm) for gm in done], [str(gm.graph) for gm in done]

    ranks = list(product(range(case.nodes), range(case.ranks_per_node)))
    first, text = texts(*ranks[0])
    assert all(texts(*rank)[0] == first for rank in ranks[1:])
    assert texts(*ranks[0])[1] == text


def communication(gm: GraphModule) -> list[tuple[object, ...]]:
    nodes = [n for n in gm.graph.nodes if n.target in ops.EXPLICIT and n.target not in BOOKKEEPING]
    steps = [n.meta[META].step for n in nodes]
    return [(s.kind, s.bucket, s.bytes, s.label) for s in steps]


# --- the checks notice ------------------------------------------------------------------------------------

FOUR = {f"w{i}": (4, 4) for i in range(4)}
W = 4 * 4 * 4  # bytes of each
WHERE = Where()


def four(
    key: tuple[Direction, Variant] = FORWARD, *, budget: int | None = None, strategy: str = "zero3"
) -> Scheduled:
    """Four equal parameters in buckets of their own, used once each."""
    made = lower_toy(FOUR, WHERE, strategy=strategy, bucket_bytes=1)
    return scheduled(made.graphs[key], replace(made.contexts[key], in_flight_bytes=budget))


def late_free(after: list[Node]) -> None:
    free = next(n for n in after if n.target is ops.free)
    free.all_input_nodes[0].append(free)


def second_free(after: list[Node]) -> None:
    free = next(n for n in after if n.target is ops.free)
    with free.graph.inserting_before(free):
        free.graph.node_copy(free, lambda n: n)


def second_wait(after: list[Node]) -> None:
    wait = next(n for n in after if n.target is ops.wait)
    with wait.graph.inserting_before(wait):
        wait.graph.node_copy(wait, lambda n: n)


def no_wait(after: list[Node]) -> None:
    wait = next(n for n in after if n.target is ops.wait and users(n.args[0], ops.wait) == [n])
    wait.replace_all_uses_with(wait.args[0])
    wait.graph.erase_node(wait)


def all_at_once(after: list[Node]) -> None:
    first = next(n for n in after if n.target in ops.EXPLICIT and n.target is not ops.check)
    for node in after:
        if node.target in GATHERS or isinstance(node.meta.get(META), Packing):
            first.prepend(node)


def swapped_compute(after: list[Node]) -> None:
    one, two = [n for n in after if n.target is aten.view.default][:2]
    two.append(one)


def reduction_first(after: list[Node]) -> None:
    """The second half of a run's reduction in front of its gathers."""
    for run in runs(after):
        gathers = [n for n in run if n.target in GATHERS]
        reductions = [n for n in run if n.target in REDUCTIONS]
        if gathers and reductions:
            gathers[0].prepend(reductions[0])
            return
    raise AssertionError("no gather starts where a reduction does")


@pytest.mark.parametrize(
    "damage",
    [late_free, second_free, second_wait, no_wait, all_at_once, swapped_compute, reduction_first],
)
def test_the_checks_notice(damage: Callable[[list[Node]], None]) -> None:
    check(four(BACKWARD))
    done = four(BACKWARD)
    damage(done.after)
    with pytest.raises((AssertionError, ValueError, RuntimeError)):
        check(done)


# --- what early and late mean -----------------------------------------------------------------------------


def order(done: Scheduled, *skipped: Callable[..., Any]) -> list[str]:
    """Explicit nodes as `kind bucket`, a wait with what it waits for, and `compute` for each run of it."""
    found: list[str] = []
    for node in done.after:
        if node.target in BOOKKEEPING or node.target in skipped:
            continue
        if node.target is ops.wait:
            kind = node.args[0].target
            if kind not in skipped:
                found.append(f"wait {kind.__name__} {node.kwargs['bucket']}")
        elif node.target in ops.EXPLICIT:
            found.append(f"{node.target.__name__} {node.kwargs['bucket']}")
        elif is_compute(node) and found[-1:] != ["compute"]:
            found.append("compute")
    return found


def just_in_time(buckets: Sequence[int]) -> list[str]:
    return [
        step
        for b in buckets
        for step in (
            f"inter_all_gather {b}",
            f"intra_all_gather {b}",
            f"wait intra_all_gather {b}",
            "compute",
            f"free {b}",
        )
    ]


def test_a_budget_for_nothing_more_is_just_in_time() -> None:
    forward = order(four(budget=1))
    assert [s for s in forward if s != "compute"] == [
        s for s in just_in_time(range(4)) if s != "compute"
    ]


def test_a_tight_backward_waits_for_a_reduction_when_the_next_one_starts() -> None:
    done = four(BACKWARD, budget=1)
    assert peak(done.after, done.ctx) == (W + W // 2) + (W + W // 2)
    steps = [s for s in order(done) if "reduce_scatter" in s]
    assert steps[:3] == [
        "intra_reduce_scatter 3",
        "inter_reduce_scatter 3",
        "wait intra_reduce_scatter 3",
    ]
    assert steps[3:6] == [
        "wait inter_reduce_scatter 3",
        "intra_reduce_scatter 2",
        "inter_reduce_scatter 2",
    ]


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
@pytest.mark.parametrize("key", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_a_generous_budget_starts_everything_at_the_first_cut(
    strategy: str, key: tuple[Direction, Variant]
) -> None:
    done = four(key, budget=GENEROUS, strategy=strategy)
    check(done)
    starts = [i for i, n in enumerate(done.after) if n.target in GATHERS]
    first = next(i for i, n in enumerate(done.after) if is_compute(n) or n.target is ops.wait)
    assert len(starts) == 8
    assert max(starts) < first
    reductions = calls(done.gm, ops.inter_reduce_scatter)
    waits = [u for r in reductions for u in r.users]
    at = {n: i for i, n in enumerate(done.after)}
    assert all(at[r] < at[w] for r, w in product(reductions, waits))  # gradients at the very end


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
@pytest.mark.parametrize("key", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_by_default_the_next_bucket_starts_before_compute_waits_for_this_one(
    strategy: str, key: tuple[Direction, Variant]
) -> None:
    done = four(key, strategy=strategy)
    check(done)
    at = {n: i for i, n in enumerate(done.after)}
    intra = calls(done.gm, ops.intra_all_gather)
    for this, following in pairwise(intra):
        assert at[following] < at[last_wait(this)]
    fetches = [n.all_input_nodes[0] for n in intra]
    for this, later in zip(intra, fetches[2:], strict=False):
        assert at[later] < at[last_wait(this)]  # node shards further ahead
    assert at[intra[2]] > at[last_wait(intra[0])]  # and no more than that


def test_stores_run_beside_compute_and_are_waited_for_when_the_bucket_is_freed() -> None:
    done = four(strategy="fcdp")
    at = {n: i for i, n in enumerate(done.after)}
    for store in calls(done.gm, ops.store):
        (wait,) = store.users
        gather = last_wait(store.all_input_nodes[0])
        (free,) = users(gather, ops.free)
        between = done.after[at[gather] : at[wait]]
        assert at[store] < at[gather]
        assert any(is_compute(n) for n in between)
        assert at[free] == at[wait] + 1


def test_steps_say_how_early_they_are() -> None:
    labels = [n.meta[META].step.label for n in calls(four().gm, ops.intra_all_gather)]
    assert labels == ["1 cuts early", "1 cuts early", "1 cuts early", "1 cuts early"]
    tight = [n.meta[META].step.label for n in calls(four(budget=1).gm, ops.intra_all_gather)]
    assert set(tight) <= {"just in time", "1 cuts early"}


def test_a_graph_without_communication_is_left_alone() -> None:
    b = GraphBuilder({})
    gm = b.finish(b.call(aten.relu.default, b.input("x", (2,))))
    ctx = make_context({}, WHERE)
    before = str(gm.graph)
    assert str(schedule(gm, ctx).graph) == before
    assert in_flight_bytes(gm, ctx) == 0
    control = lower_toy(FOUR, WHERE, strategy="zero3", bucket_bytes=1)
    before = str(control.forward().graph)
    assert str(schedule(control.forward(), control.contexts[FORWARD]).graph) != before


@pytest.mark.parametrize("key", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_work_grows_with_the_graph_and_not_with_its_square(key: tuple[Direction, Variant]) -> None:
    """Counted in Python calls, not in time."""

    def work(layers: int) -> int:
        names = {f"w{i}": (4,) for i in range(layers)}
        made = lower_toy(names, WHERE, strategy="zero3", bucket_bytes=1)
        count = 0

        def tick(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(tick)
        try:
            schedule(made.graphs[key], made.contexts[key])
        finally:
            sys.setprofile(None)
        return count

    assert work(120) < 4 * work(40)  # n * log n: 3.9; its square: 9
