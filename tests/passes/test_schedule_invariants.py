"""Scheduling changes only when transfers run, for models, uses and budgets of every kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from torch.fx import GraphModule, Node

from builders_graph import (
    Lowered,
    Shape,
    Where,
    aten,
    lower_pair,
    make_context,
    make_specs,
    toy_backward,
    toy_forward,
)
from builders_plan import shapes
from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META, Packing
from fcdp_compile.passes.schedule import in_flight_bytes, schedule
from tests.passes.in_flight import peak
from tests.passes.schedule_checks import check, runs
from tests.passes.scheduled import (
    BACKWARD,
    BOOKKEEPING,
    GATHERS,
    GENEROUS,
    REDUCTIONS,
    four,
    scheduled,
    users,
)

quick = settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])


STRATEGIES = ("zero3", "zero++", "fcdp", "zero3+ho_ring", "fcdp+ho_ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, how it is used and how it is sharded; ranks differ only in their place."""

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
        """Every graph of one rank, with gathers just in time."""
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
        strategy=draw(st.sampled_from(STRATEGIES)),
        frozen=tuple(draw(some)),
        uses=tuple(draw(st.permutations([*names, *draw(some)]))),
        backward_uses=tuple(draw(st.permutations([*names, *draw(some)]))),
        returned=tuple(dict.fromkeys(draw(st.just([]) | some))),
        viewed=draw(st.booleans()),
        bucket_bytes=draw(st.sampled_from([1, 200, 2000, 1 << 20])),
        budget=draw(st.sampled_from([None, 1, 1000, 20_000, GENEROUS]) | st.integers(1, 50_000)),
    )


@quick
@given(cases())
def test_invariants(case: Case) -> None:
    made = case.lower()
    for key, gm in made.graphs.items():
        assert in_flight_bytes(gm) == peak(list(gm.graph.nodes), made.contexts[key])
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
    """Move the second half of a reduction in front of the gathers of its run."""
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
