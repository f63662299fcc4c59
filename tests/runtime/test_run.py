"""Which variant runs, and which buckets are refreshed before it."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from builders_graph import Where, lower_toy
from fcdp_compile.devices import Cpu
from fcdp_compile.errors import FcdpError
from fcdp_compile.passes.describe import describe
from fcdp_compile.plan import Direction, Plan, Variant
from fcdp_compile.runtime.buckets.validity import Verdict
from fcdp_compile.runtime.collectives.agreement import About
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.marks import Exposure
from fcdp_compile.runtime.run import CompiledPlan
from fcdp_compile.strategy import Strategy

COLD, WARM = Variant.COLD, Variant.WARM


class Accumulation:
    """Says which gradients are accumulated."""

    def __init__(self) -> None:
        self.is_on = False
        self.waiting: list[int] = []
        self.begun: list[bool] = []

    def begin_graph(self, number: int, *, accumulates: bool) -> None:
        assert number == -1, "there is no backward here"
        self.begun.append(accumulates)

    def waits_for(self, buckets: Iterable[Any]) -> bool:
        return any(b.id in self.waiting for b in buckets)


class Model:
    """Says which buckets are stale, and records which are refreshed."""

    def __init__(self, strategy: str) -> None:
        self.accumulates = Strategy.parse(strategy).accumulates_on is not None
        self.stale_ids: list[int] = []
        self.asked: list[int] = []
        self.refreshed: list[int] = []
        self.replaced: list[int] = []
        self.released: list[int] = []
        self.given_way: list[int] = []
        self.modes: list[str] = []
        self.accumulation = Accumulation()
        self.bound: dict[int, dict[int, Any]] = {}
        self.buckets = SimpleNamespace(
            note_run=lambda buckets: None,
            release_rivals=lambda bucket: self.replaced.append(bucket.id),
        )
        self.counters = Counters()
        self.exposure = Exposure(Cpu())
        self.collectives = SimpleNamespace()
        self.lanes = SimpleNamespace(device=Cpu())
        self.records = SimpleNamespace(not_at_home=list, of=lambda b: [])
        self.seams = SimpleNamespace(
            begin=lambda event, leading: None,
            start_next=lambda room_bytes: None,
            living=list,
            is_outdated=lambda: False,
            cut=lambda: None,
        )
        self.batches = SimpleNamespace(compare=lambda direction, inputs: None)
        self.outside = SimpleNamespace(give_way=self.given_way.extend)
        self.validity = SimpleNamespace(check=self.check)
        self.optimizer_hooks = SimpleNamespace(note_backward=lambda *, accumulates: None)

    def check(
        self,
        buckets: list[Any],
        about: About,
        *,
        is_given: bool,
        early: list[Any],
        is_outdated: Any,
    ) -> Verdict:
        self.modes.append(about.mode)
        self.asked = [b.id for b in buckets]
        stale = {b.id: b.id in self.stale_ids for b in buckets}
        return Verdict(
            stale=stale,
            refused={},
            is_given=is_given,
            is_outdated=is_outdated(),
            are_open=False,
        )

    def bind(self, plan: Plan) -> None:
        """What a plan's run asks of its buckets."""
        self.bound[plan.graph] = {
            b.id: SimpleNamespace(
                id=b.id,
                bucket=b,
                placement=placement,
                keys=[b.id],
                refresh=partial(self.refreshed.append, b.id),
                release_shards=partial(self.released.append, b.id),
            )
            for b, placement in plan.placed
        }


def compiled(strategy: str, host_bytes: int | None = None) -> tuple[CompiledPlan, Model, list[str]]:
    """Buckets 0 and 2 trainable, 1 frozen; programs that only record their name."""
    made = lower_toy(
        {"a": (4,), "frozen": (4,), "b": (4,)},
        Where(),
        strategy=strategy,
        frozen=["frozen"],
        bucket_bytes=1,
        segmented=True,
        host_bytes=host_bytes,
    )
    model, ran = Model(strategy), []
    graphs = {k: gm for k, gm in made.graphs.items() if k[1] in (COLD, WARM)}
    plan = Plan(
        strategy=strategy,
        nodes=2,
        ranks_per_node=2,
        graph=0,
        buckets=tuple(made.buckets[i] for i in sorted(made.buckets)),
        placements=tuple(made.placements[i] for i in sorted(made.buckets)),
        refresh=(1,) if strategy == "fcdp" and host_bytes is None else (),
        schedules=tuple(describe(gm, made.contexts[k]) for k, gm in graphs.items()),
    )
    assert [b.frozen for b in plan.buckets][:3] == [False, True, False]
    model.bind(plan)
    bound = CompiledPlan(plan, model)

    def program(name: str) -> Any:
        def run(
            model: Model,
            buckets: dict[int, Any],
            args: list[Any],
            *,
            accumulates: bool = False,
            given: int = 0,
            then: Any = None,
            drained: Any = None,
        ) -> tuple[Any, ...]:
            assert not given, "no model has its parameters among the arguments here"
            ran.append(name)
            args.clear()
            return ()

        told = {"is_stamped": True, "shall_accumulate": lambda args: bool(args)}
        told["was_given"] = lambda args: 0
        return SimpleNamespace(run=run, **told)

    for direction, variant in graphs:
        bound.programs[direction, variant] = program(f"{direction.value} {variant.value}")
    return bound, model, ran


@pytest.mark.parametrize(
    ("stale", "variant", "refreshed"),
    [
        ([0, 1, 2], "cold", [1]),
        ([0, 2], "cold", []),
        ([1], "warm", [1]),
        ([0], "warm", [0]),
        ([2, 1], "warm", [1, 2]),
        ([], "warm", []),
    ],
)
def test_resident_copies(stale: list[int], variant: str, refreshed: list[int]) -> None:
    bound, model, ran = compiled("fcdp")
    model.stale_ids = stale
    args = [object()]
    bound.forward(Direction.FORWARD, args)
    assert args == []
    assert sorted(model.asked) == [0, 1, 2]
    assert ran == [f"forward {variant}"]
    assert model.refreshed == refreshed
    assert sorted(model.replaced) == sorted(model.given_way) == sorted(stale)
    assert model.released == [1], "frozen shards, at every forward: they may have come back"


@pytest.mark.parametrize("stale", [[], [0]])
def test_what_has_no_place_in_the_cache_is_not_asked_for_and_takes_none(stale: list[int]) -> None:
    """Only the first bucket fits; yet the old copies of the others are given back."""
    bound, model, ran = compiled("fcdp", host_bytes=8)
    model.stale_ids = stale
    bound.forward(Direction.FORWARD, [])
    assert model.asked == [0]
    assert ran == ["forward cold" if stale else "forward warm"]
    assert model.refreshed == []
    assert sorted(model.replaced) == sorted([*stale, 1, 2])
    assert model.released == [], "what the host does not keep stays on the device"


@pytest.mark.parametrize("strategy", ["zero3", "zero++"])
def test_others_always_run_cold(strategy: str) -> None:
    bound, model, ran = compiled(strategy)
    bound.forward(Direction.FORWARD, [])
    bound.forward(Direction.FORWARD, [])
    assert ran == ["forward cold"] * 2
    assert (model.refreshed, model.released) == ([], [])


@pytest.mark.parametrize("strategy", ["zero3", "zero++", "fcdp"])
def test_a_backward_asks_nobody(strategy: str) -> None:
    bound, model, ran = compiled(strategy)
    model.stale_ids = [0, 1, 2]
    bound.backward([])
    assert ran == ["backward cold"]
    assert (model.asked, model.refreshed) == ([], [])


@pytest.mark.parametrize(
    ("strategy", "is_told", "waiting", "expected"),
    [
        ("fcdp", False, [], "cold"),
        ("fcdp", True, [], "accumulate"),
        ("fcdp", True, [0], "accumulate"),
        ("fcdp", False, [2], "collect"),
        ("fcdp", False, [1], "cold"),  # a frozen bucket of another graph
        ("zero3", True, [], "cold"),
    ],
)
def test_what_a_backward_does_with_gradients(
    strategy: str, is_told: bool, waiting: list[int], expected: str
) -> None:
    bound, model, ran = compiled(strategy)
    cold = bound.programs[Direction.BACKWARD, COLD]
    added = []

    def add() -> None:
        added.append(len(ran))
        for variant in (Variant.ACCUMULATE, Variant.COLLECT):
            run = partial(_note, ran, variant.value)
            bound.programs[Direction.BACKWARD, variant] = SimpleNamespace(run=run)

    bound.add_accumulation = add
    cold.run = partial(_note, ran, "cold")
    model.accumulation.waiting = waiting
    for _ in range(2):
        bound.backward([1] if is_told else [])
    assert ran == [expected] * 2
    assert model.accumulation.begun == ([] if strategy == "zero3" else [is_told] * 2)
    assert added == ([] if expected == "cold" else [0]), "lowered when first needed, and once"


def _note(
    ran: list[str],
    name: str,
    model: Model,
    buckets: dict[int, Any],
    args: list[Any],
    *,
    accumulates: bool,
    given: int,
    then: Any,
    drained: Any = None,
) -> tuple[Any, ...]:
    assert not accumulates, "that is a forward's"
    ran.append(name)
    return ()


@pytest.mark.parametrize("is_on", [False, True])
def test_ranks_compare_whether_they_accumulate(is_on: bool) -> None:
    bound, model, _ = compiled("fcdp")
    bound.programs[Direction.INFERENCE, WARM] = bound.programs[Direction.FORWARD, WARM]
    model.accumulation.is_on = is_on
    bound.forward(Direction.FORWARD, [])
    bound.forward(Direction.INFERENCE, [])
    assert model.modes == ["accumulates" if is_on else "synchronises", "synchronises"]


def test_the_model_is_held_weakly() -> None:
    bound, model, ran = compiled("fcdp")
    del model
    gc.collect()
    for call in (lambda: bound.forward(Direction.FORWARD, []), lambda: bound.backward([])):
        with pytest.raises(FcdpError, match="no longer exists"):
            call()
    assert ran == []
