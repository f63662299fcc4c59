"""A backward reduces gradients, accumulates them, or adds accumulated ones; exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from builders_graph import (
    Lowered,
    Where,
    aten,
    calls,
    lower_toy,
    make_specs,
    toy_backward,
)
from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META
from fcdp_compile.passes.schedule import in_flight_bytes
from fcdp_compile.plan import Direction, Variant
from fcdp_compile.strategy import GradientOn, Strategy
from tests.passes.in_flight import peak
from tests.passes.lowered import check
from tests.passes.schedule_checks import check as check_schedule
from tests.passes.scheduled import REDUCTIONS, scheduled

COLD, ACCUMULATE, COLLECT = Variant.COLD, Variant.ACCUMULATE, Variant.COLLECT
VARIANTS = (COLD, ACCUMULATE, COLLECT)
NONE, INTRA, GLOBAL = "zero1", "fcdp", "zero3"
"""A strategy for each scope at which gradients accumulate."""

SHAPES = {"w": (5, 3), "b": (3,), "s": ()}  # nothing divides by 2 or 4
SIZES = ((2, 2), (2, 1), (1, 2))

WITHIN, BETWEEN = "intra_reduce_scatter", "inter_reduce_scatter"
WAITS = ["collect", "accumulate"]
EXPECTED: dict[tuple[str, tuple[int, int], Variant], list[str]] = {
    (GLOBAL, (2, 2), COLD): [WITHIN, BETWEEN],
    (GLOBAL, (2, 1), COLD): [BETWEEN],
    (GLOBAL, (1, 2), COLD): [WITHIN],
    (INTRA, (2, 2), COLD): [WITHIN, BETWEEN],
    (INTRA, (2, 2), ACCUMULATE): [WITHIN, *WAITS],
    (INTRA, (2, 2), COLLECT): [WITHIN, "collect", BETWEEN],
    (INTRA, (2, 1), COLD): [BETWEEN],
    (INTRA, (2, 1), ACCUMULATE): WAITS,
    (INTRA, (2, 1), COLLECT): ["collect", BETWEEN],
    (INTRA, (1, 2), COLD): [WITHIN],  # one node has no traffic between nodes to avoid
    (NONE, (2, 2), COLD): [WITHIN, BETWEEN],
    (NONE, (2, 2), ACCUMULATE): WAITS,
    (NONE, (2, 2), COLLECT): ["collect", WITHIN, BETWEEN],
    (NONE, (2, 1), COLD): [BETWEEN],
    (NONE, (2, 1), ACCUMULATE): WAITS,
    (NONE, (2, 1), COLLECT): ["collect", BETWEEN],
    (NONE, (1, 2), COLD): [WITHIN],
    (NONE, (1, 2), ACCUMULATE): WAITS,
    (NONE, (1, 2), COLLECT): ["collect", WITHIN],
}


def lowered(
    strategy: str, size: tuple[int, int] = (2, 2), *, on: str = "auto", **more: Any
) -> Lowered:
    chosen = Strategy.parse(strategy)
    if chosen.accumulates_on is not None:
        chosen = replace(chosen, gradient_on=GradientOn(on))
    where = Where(nodes=size[0], ranks_per_node=size[1])
    return lower_toy(SHAPES, where, strategy=chosen, frozen=["b"], **more)


def backward(made: Lowered, variant: Variant) -> GraphModule:
    return made.graphs[Direction.BACKWARD, variant]


def reductions(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.target in REDUCTIONS]


def names(gm: GraphModule) -> list[str]:
    return [n.target.__name__ for n in reductions(gm)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", [NONE, INTRA, GLOBAL])
def test_sequences(strategy: str, size: tuple[int, int]) -> None:
    made = lowered(strategy, size)
    found = {
        (strategy, size, v): names(backward(made, v))
        for v in VARIANTS
        if (Direction.BACKWARD, v) in made.graphs
    }
    assert found == {k: n for k, n in EXPECTED.items() if k[:2] == (strategy, size)}
    for variant in VARIANTS:
        if (strategy, size, variant) in found:
            gm = backward(made, variant)
            *_, last = reductions(gm)
            assert [n.args for n in calls(gm, ops.wait) if n.args[0].target in REDUCTIONS] == [
                (last,)
            ], "each step takes what the one before has on its way"
            check(gm, _untouched(made))


def _untouched(made: Lowered) -> GraphModule:
    ctx = made.contexts[Direction.BACKWARD, COLD]
    where = Where(nodes=ctx.nodes, ranks_per_node=ctx.ranks_per_node)
    return toy_backward(make_specs(SHAPES, where), frozen=["b"])


def test_a_backward_that_synchronises_does_not_depend_on_where_gradients_wait() -> None:
    assert lowered(GLOBAL).backward.graph.find_nodes(op="call_function", target=ops.collect) == []
    texts = {on: str(backward(lowered(INTRA, on=on), COLD).graph) for on in ("gpu", "host")}
    assert texts["gpu"] == texts["host"]


@pytest.mark.parametrize("variant", [ACCUMULATE, COLLECT])
def test_every_step_says_whose_gradients_they_are(variant: Variant) -> None:
    """Steps name the trained parameters in the bucket's order, even if the graph reduces them otherwise."""
    made = lowered(INTRA)
    (trained,) = {b.id for b in made.buckets.values() if not b.frozen}
    for node in reductions(backward(made, variant)):
        assert node.kwargs == {"bucket": trained, "params": ("w", "s")}


@pytest.mark.parametrize("variant", [ACCUMULATE, COLLECT])
@pytest.mark.parametrize(("strategy", "ranks"), [(INTRA, 2), (NONE, 4)])
def test_bytes_that_go_to_the_host_and_back(strategy: str, ranks: int, variant: Variant) -> None:
    """A slot has one of w's three columns (the last rank's is padding) and the scalar; sums are fp32."""
    held_bytes = ranks * (5 + 1) * 4
    for on, expected in (("host", held_bytes), ("gpu", 0)):
        gm = backward(lowered(strategy, on=on), variant)
        waits = [n for n in reductions(gm) if n.target in (ops.collect, ops.accumulate)]
        assert [n.meta[META].step.bytes for n in waits] == [expected] * len(waits)


DTYPES = (
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
)


@pytest.mark.parametrize(("reduced", "wide"), DTYPES)
@pytest.mark.parametrize("strategy", [NONE, INTRA])
def test_what_waits_is_of_fp32_or_wider(
    strategy: str, reduced: torch.dtype, wide: torch.dtype
) -> None:
    """Bytes agree, too; the last micro-batch sends the reduce dtype again."""
    made = lowered(strategy, on="host", reduces=reduced)
    for variant in VARIANTS:
        for node in reductions(backward(made, variant)):
            waits = node.target in (ops.collect, ops.accumulate)
            kept = variant is ACCUMULATE and waits
            assert node.meta["val"].dtype is (wide if kept else reduced)
            if waits:
                size = node.meta["val"].numel() * wide.itemsize
                assert node.meta[META].step.bytes == size


@pytest.mark.parametrize("home", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", [NONE, INTRA])
def test_an_accumulating_backward_gives_negative_zeros(strategy: str, home: torch.dtype) -> None:
    made = lowered(strategy, home=home, gathers=torch.float32)
    specs = make_specs(SHAPES, Where(), home=home)
    given = dict(
        zip(SHAPES, backward(made, ACCUMULATE).graph.output_node().args[0][1:], strict=True)
    )
    assert given["b"] is None, "frozen"
    for spec in specs.values():
        if (node := given[spec.name]) is None:
            continue
        assert node.target is aten.full.default
        found = node.target(*node.args, **node.kwargs)
        assert (tuple(found.shape), found.dtype) == (spec.local_shape, home)
        assert torch.all(found == 0)
        assert torch.all(found.signbit())
        assert (node.meta["val"].shape, node.meta["val"].dtype) == (found.shape, found.dtype)
    gradients = backward(made, COLLECT).graph.output_node().args[0][1:]
    assert not any(n is not None and n.target is aten.full.default for n in gradients)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("in_flight", [None, 1, 300])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy", [NONE, INTRA])
def test_schedules(
    strategy: str, size: tuple[int, int], in_flight: int | None, variant: Variant
) -> None:
    """One parameter in a bucket, so that several reductions are under way."""
    made = lowered(strategy, size, bucket_bytes=1)
    if (key := (Direction.BACKWARD, variant)) not in made.graphs:
        assert (strategy, size) == (INTRA, (1, 2))
        return
    ctx = replace(made.contexts[key], in_flight_bytes=in_flight)
    before = names(made.graphs[key])
    assert in_flight_bytes(made.graphs[key]) == peak(list(made.graphs[key].graph.nodes), ctx)
    done = scheduled(made.graphs[key], ctx)
    check_schedule(done)
    assert sorted(names(done.gm)) == sorted(before)
