"""The loop over a lowered graph: values are right, and dropped just after their last use."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from builders_graph import Where, lower_toy
from fcdp_compile.errors import StaleParameterError
from fcdp_compile.plan import Direction, Kind, Variant
from fcdp_compile.runtime.program import Program
from tests.runtime.fake_model import fake_model, program, same_on_all_ranks

WHERE = Where()
EVEN = {"w": (8, 4), "b": (4,)}
X, T = torch.tensor(3.0), torch.tensor(2.0)


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize("scheduled", [False, True])
def test_forward_and_backward_compute_the_toy_model(
    strategy: str, bucket_bytes: int, scheduled: bool
) -> None:
    made = lower_toy(
        EVEN,
        WHERE,
        strategy=strategy,
        bucket_bytes=bucket_bytes,
        scheduled=scheduled,
        segmented=True,
    )
    model = fake_model(strategy)
    full, homes = same_on_all_ranks()
    y, *saved = program(made, Direction.FORWARD).run(model, [*homes, X])
    squares = sum((w * w).sum() for w in full.values())
    assert torch.equal(y, X * squares)
    dx, *grads = program(made, Direction.BACKWARD).run(model, [*saved, T])
    assert torch.equal(dx, T * squares)
    for grad, home in zip(grads, homes, strict=True):
        assert torch.equal(grad, 2 * T * X * home)
    gathers = model.counters.calls[Kind.INTER_ALL_GATHER.value]
    assert gathers == len(made.buckets) * (2 if strategy == "zero3" else 1)


def test_warm_loads_what_cold_stored() -> None:
    made = lower_toy(EVEN, WHERE, segmented=True)
    model = fake_model()
    _, homes = same_on_all_ranks()
    cold = program(made, Direction.FORWARD).run(model, [*homes, X])
    before = model.counters.calls[Kind.INTER_ALL_GATHER.value]
    warm = program(made, Direction.FORWARD, Variant.WARM).run(model, [*homes, X])
    assert torch.equal(warm[0], cold[0])
    assert model.counters.calls[Kind.INTER_ALL_GATHER.value] == before == 1


def test_the_arguments_are_emptied_and_nothing_is_kept() -> None:
    made = lower_toy(EVEN, WHERE, strategy="zero3", segmented=True)
    model = fake_model("zero3")
    running = program(made, Direction.FORWARD)
    _, homes = same_on_all_ranks()
    alive = [weakref.ref(h) for h in homes]
    args = [*homes, X.clone()]
    del homes
    results = running.run(model, args)
    assert args == []
    assert all(a() is not None for a in alive)  # saved for the backward
    alive += [weakref.ref(r) for r in results if r is not X]
    del results
    assert [a() for a in alive] == [None] * len(alive)


class Watch:
    """Wraps segments to see which of their arguments live on when the next one starts."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def __call__(self, segment: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        def call(args: list[Any]) -> Any:
            living = [t for s in self.seen if (t := s()) is not None]
            self.alive.append(len({t.untyped_storage().data_ptr() for t in living}))
            del living
            result = segment(args)
            assert args == []
            self.seen += [
                weakref.ref(r) for r in result if isinstance(r, Tensor) and r.numel() == 32
            ]
            return result

        return call


@pytest.mark.parametrize("scheduled", [False, True])
def test_full_parameters_die_before_the_next_bucket_is_unpacked(scheduled: bool) -> None:
    """Three parameters of 32 elements in buckets of their own: never two alive."""
    shapes = {"a": (8, 4), "b": (4, 8), "c": (32,)}
    made = lower_toy(
        shapes, WHERE, strategy="zero3", bucket_bytes=1, scheduled=scheduled, segmented=True
    )
    homes = [torch.ones(2, 4), torch.ones(1, 8), torch.ones(8)]
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        watch = Watch()
        running = program(made, direction, wrap=watch)
        if direction is Direction.FORWARD:
            args = [*homes, X]
        else:
            stamps = torch.zeros(3 + 3, dtype=torch.int64)
            args = [X, *homes, stamps, T]
        model = fake_model("zero3")
        model.collectives.is_instant = True  # else a gradient lives until its lane handles it
        running.run(model, args)
        assert len(watch.alive) > 2
        assert max(watch.alive) <= 1


def test_an_argument_that_nobody_reads_is_dropped_before_the_start() -> None:
    made = lower_toy({"w": (8, 4)}, WHERE, segmented=True)
    gm = made.forward(Variant.WARM)
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("unused")
    unused = torch.ones(3)
    alive = weakref.ref(unused)
    seen = []

    def wrap(segment: Any) -> Any:
        def call(args: list[Any]) -> Any:
            seen.append(alive())
            return segment(args)

        return call

    model = fake_model()
    model.bind(made.buckets[0]).store(torch.ones(16), 0).wait()
    running = program(made, Direction.FORWARD, Variant.WARM, wrap=wrap)
    args = [unused, torch.ones(2, 4), X]
    del unused
    running.run(model, args)
    assert seen
    assert seen == [None] * len(seen)


def test_steps_bear_the_names_of_their_kind_and_bucket() -> None:
    made = lower_toy(EVEN, WHERE, bucket_bytes=1, segmented=True)
    model = fake_model()
    _, *saved = program(made, Direction.FORWARD).run(model, [*same_on_all_ranks()[1], X])
    program(made, Direction.BACKWARD).run(model, [*saved, T])
    assert model.collectives.names == [
        f"fcdp::{kind} {bucket}"
        for kinds, buckets in [
            (("inter_all_gather", "intra_all_gather"), (0, 1)),
            (("intra_all_gather", "intra_reduce_scatter", "inter_reduce_scatter"), (1, 0)),
        ]
        for bucket in buckets
        for kind in kinds
    ]


@pytest.mark.parametrize("kind", [Kind.INTER_ALL_GATHER, Kind.INTRA_ALL_GATHER])
def test_a_step_that_fails_fails_the_run_before_compute_sees_its_result(kind: Kind) -> None:
    made = lower_toy(EVEN, WHERE, scheduled=True, segmented=True)
    model = fake_model()
    model.collectives.fails = {kind}
    ran: list[int] = []

    def wrap(segment: Any) -> Any:
        def call(args: list[Any]) -> Any:
            ran.append(len(args))
            return segment(args)

        return call

    homes = same_on_all_ranks()[1]
    with pytest.raises(RuntimeError, match=rf"fcdp::{kind.value} 0 failed"):
        program(made, Direction.FORWARD, wrap=wrap).run(model, [*homes, X])
    assert ran == [len(homes)]  # only the packing of the shards
    model.collectives.fails = set()
    y, *_ = program(made, Direction.FORWARD).run(model, [*homes, X])
    assert torch.isfinite(y)


def test_the_error_of_a_run_holds_none_of_its_values() -> None:
    """A handler that still holds the error may need the memory."""
    made = lower_toy(EVEN, WHERE, strategy="zero3", segmented=True)
    model = fake_model("zero3")
    model.collectives.fails = {Kind.INTRA_ALL_GATHER}
    _, homes = same_on_all_ranks()
    args = [*(h.clone() for h in homes), X.clone()]
    alive = [weakref.ref(a) for a in args]
    with pytest.raises(RuntimeError) as caught:
        program(made, Direction.FORWARD).run(model, args)
    assert caught.value.__traceback__ is not None
    assert [a() for a in alive] == [None] * len(alive)


def test_wrong_number_of_arguments() -> None:
    made = lower_toy(EVEN, WHERE, segmented=True)
    with pytest.raises(ValueError, match="zip"):
        program(made, Direction.FORWARD).run(fake_model(), [X])


class TestGenerations:
    """A backward uses what its forward saw, or refuses."""

    def start(self, strategy: str) -> tuple[Any, Program, Program, list[Tensor]]:
        made = lower_toy(EVEN, WHERE, strategy=strategy, segmented=True)
        forward = program(made, Direction.FORWARD)
        backward = program(made, Direction.BACKWARD)
        return fake_model(strategy), forward, backward, same_on_all_ranks()[1]

    @pytest.mark.parametrize("strategy", ["zero++", "fcdp"])
    def test_a_backward_loads_the_generation_its_forward_stored(self, strategy: str) -> None:
        model, forward, backward, homes = self.start(strategy)
        y, *saved = forward.run(model, [*homes, X])
        model.current = 1  # an optimizer stepped, the copy is of generation 0
        dx, *_ = backward.run(model, [*saved, T])
        assert torch.equal(dx * X, y * T)

    @pytest.mark.parametrize("strategy", ["zero++", "fcdp"])
    def test_it_refuses_a_copy_that_was_gathered_since(self, strategy: str) -> None:
        model, forward, backward, homes = self.start(strategy)
        _, *saved = forward.run(model, [*homes, X])
        model.current = 1
        forward.run(model, [*homes, X])
        with pytest.raises(StaleParameterError):
            backward.run(model, [*saved, T])

    def test_it_refuses_to_gather_changed_parameters(self) -> None:
        model, forward, backward, homes = self.start("zero3")
        _, *saved = forward.run(model, [*homes, X])
        model.current = 1
        with pytest.raises(StaleParameterError, match="changed between the forward"):
            backward.run(model, [*saved, T])

    @pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
    def test_two_forwards_before_their_backwards(self, strategy: str) -> None:
        model, forward, backward, homes = self.start(strategy)
        first = forward.run(model, [*homes, X])
        second = forward.run(model, [*homes, 2 * X])
        for y, *saved in (first, second):
            dx, *_ = backward.run(model, [*saved, T])
            assert torch.equal(dx * saved[0], y * T)
