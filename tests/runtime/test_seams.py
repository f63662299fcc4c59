"""Transfers that start while the program before still computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from builders_graph import Where, lower_toy
from fcdp_compile.core.params.layout import choose_dim
from fcdp_compile.passes.describe import describe
from fcdp_compile.plan import Direction, Kind, Variant
from fcdp_compile.plan.whole_step import leading
from fcdp_compile.runtime.seams import Seams
from tests.passes.lockstep import cut
from tests.runtime.fake_model import fake_model, program

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
A, B, C = (("plan " + name, FORWARD, Variant.COLD) for name in "abc")
FULL = {"w": torch.full((8, 4), 3.0), "b": torch.full((4,), 2.0)}
SHAPES = {name: tuple(w.shape) for name, w in FULL.items()}
HOMES = [cut(w, choose_dim(w.shape, 2, 2), 2, 2)[0] for w in FULL.values()]
GATHERS = {Kind.INTER_ALL_GATHER, Kind.INTRA_ALL_GATHER}
EARLY = {
    "fcdp": {FORWARD: GATHERS, BACKWARD: {Kind.LOAD, Kind.INTRA_ALL_GATHER}},
    "zero3": {FORWARD: GATHERS, BACKWARD: GATHERS},
    "zero++": {FORWARD: GATHERS},
    "mics": {FORWARD: GATHERS, BACKWARD: GATHERS},
}
"""The kinds of transfers that start early, by strategy."""
X, T = torch.tensor(2.0), torch.tensor(1.0)


def _model(strategy: str = "fcdp") -> Any:
    model = fake_model(strategy, shards=dict(zip(FULL, HOMES, strict=True)))
    model.seams = Seams(model.validity, model.counters, model.lanes)
    return model


class TestOrder:
    """Which program follows which; the transfers do not matter."""

    @pytest.fixture
    def seams(self, monkeypatch: pytest.MonkeyPatch) -> Seams:
        made: Seams = _model().seams
        self.started: list[str] = []
        self.living = True

        def start(kind: Kind, bucket: Any) -> None:
            self.started.append(bucket.name)

        monkeypatch.setattr(made, "_start", start)
        return made

    def run(self, seams: Seams, *events: Any) -> list[str]:
        """Runs programs; returns the plan for which each of them started transfers."""
        self.started.clear()
        for event in events:
            if event is None:
                seams._counters.steps += 1
                continue
            if event[1] is FORWARD and seams.is_outdated():  # as all ranks agree
                seams.cut()
            sizes = SimpleNamespace(node_bytes=1, full_bytes=1)
            bucket: Any = SimpleNamespace(name=event[0][-1], lives=self.living, bucket=sizes)
            seams.begin(event, [(Kind.LOAD, bucket)])
            seams.start_next(None)
        return self.started

    def test_from_the_second_step_on(self, seams: Seams) -> None:
        assert self.run(seams, A, B, C, None) == []
        assert self.run(seams, A, B, C, None) == ["b", "c"]
        assert self.run(seams, A, B, C, None) == ["b", "c"]

    def test_nothing_where_another_program_followed_once(self, seams: Seams) -> None:
        self.run(seams, A, B, C, None)
        assert self.run(seams, A, C, None) == ["b"], "it was wrong once"
        assert self.run(seams, A, B, C, None, A, C) == ["c"], "after B alone"

    def test_what_follows_in_the_same_step(self, seams: Seams) -> None:
        self.run(seams, A, B, A, B, None)
        assert self.run(seams, A, B, A, B, None) == ["b", "b"], "A or an optimizer follows B"

    def test_nothing_where_a_program_has_failed(self, seams: Seams) -> None:
        self.run(seams, A, B, C, None)
        self.run(seams, A)
        seams.fail()
        assert self.run(seams, B, C, None, A, B, C) == ["c", "c"]

    def test_nothing_of_a_parameter_that_is_gone(self, seams: Seams) -> None:
        self.run(seams, A, B, C, None)
        self.living = False
        self.run(seams, A, B, C, None)
        assert self.run(seams, A, B, C, None) == []

    def test_nothing_for_the_same_plan(self, seams: Seams) -> None:
        backward = (A[0], BACKWARD, Variant.COLD)
        assert self.run(seams, *[A, backward, None] * 3) == []

    def test_the_budget(self, seams: Seams) -> None:
        made = lower_toy(SHAPES, Where(), segmented=True)
        bucket = made.buckets[0]
        enough = bucket.full_bytes + bucket.node_bytes
        bound: Any = SimpleNamespace(name="", lives=True, bucket=bucket)
        seams.begin(A, [])
        for room, count in ((None, 2), (enough, 2), (enough - 1, 0)):
            seams.begin(B, [(Kind.LOAD, bound), (Kind.INTRA_ALL_GATHER, bound)])
            seams.begin(A, [])
            self.started.clear()
            seams.start_next(room)
            assert len(self.started) == count, room


def _pair(model: Any, strategy: str, *, early: bool) -> tuple[Any, ...]:
    """A forward and its backward; the transfers of each start before it if `early`."""
    made = lower_toy(
        SHAPES, Where(), strategy=strategy, bucket_bytes=1, segmented=True, scheduled=True
    )
    args = {FORWARD: [*HOMES, X]}
    results: tuple[Any, ...] = ()
    before = ("before", FORWARD, Variant.WARM)
    for direction in (FORWARD, BACKWARD):
        running = program(made, direction)
        event = ("plan", direction, Variant.COLD)
        key = direction, Variant.COLD
        steps = leading(describe(made.graphs[key], made.contexts[key]), made.buckets)
        transfers = [
            (s.kind, model.bind(made.buckets[s.bucket])) for s in steps if s.bucket is not None
        ]
        assert {kind for kind, _ in transfers} == EARLY[strategy].get(direction, set())
        if early and transfers:
            for is_known in (False, True):
                model.seams.begin(before, [])
                model.seams.start_next(None)
                assert bool(model.seams._early) == is_known
                if not is_known:
                    model.seams.begin(event, transfers)
            if direction is FORWARD:
                assert not model.seams.is_outdated()
        model.seams.begin(event, transfers)
        results = running.run(model, args.pop(direction))
        assert not model.seams._early
        args[BACKWARD] = [*results[1:], T]
        before = ("between", FORWARD, Variant.WARM)
    return results


@pytest.mark.parametrize("strategy", EARLY)
def test_the_same_results_and_bytes(strategy: str) -> None:
    models = [_model(strategy) for _ in range(2)]
    made = [_pair(m, strategy, early=e) for m, e in zip(models, (False, True), strict=True)]
    for found, expected in zip(*made, strict=True):
        assert torch.equal(found, expected)
    assert models[0].counters.sent == models[1].counters.sent
