"""A compiled plan bound to its model: choose the variant before a forward starts, then run its program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from fcdp_compile.core.params.home_shard import bring_back_inputs
from fcdp_compile.core.params.late import LateTensor
from fcdp_compile.core.params.seals import fingerprint
from fcdp_compile.errors import FcdpError, StaleParameterError
from fcdp_compile.plan import Direction, Kind, Plan, Variant
from fcdp_compile.plan.json import to_json
from fcdp_compile.plan.recording import ScheduleKey
from fcdp_compile.plan.whole_step import leading
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.collectives.agreement import (
    ACCUMULATES,
    SYNCHRONISES,
    About,
    Question,
)
from fcdp_compile.runtime.collectives.collectives import told_alone
from fcdp_compile.runtime.lanes.lanes import range_name
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.runtime.program import Program
from fcdp_compile.runtime.recorder import Recorder
from fcdp_compile.torch_compat.autograd import backward_number
from fcdp_compile.torch_compat.tensors import MemoryLayout, storage_id


class CompiledPlan:
    """One graph of the model with one set of parameters.

    in_flight_bytes: the budget of `passes.schedule`, if the user gave one.

    The backend fills `programs`; it compiles a backward only when it is first needed.
    """

    def __init__(
        self, plan: Plan, model: ShardedModel, *, in_flight_bytes: int | None = None
    ) -> None:
        self.plan = plan
        self.in_flight_bytes = in_flight_bytes
        # Compiled code outlives the model in Dynamo's caches and must not keep its host memory alive.
        self._model = weakref.ref(model)
        self.programs: dict[ScheduleKey, Program] = {}
        # Adds the programs for `no_sync`, the first time that they are needed.
        self.add_accumulation: Callable[[], None] = lambda: None
        # Adds the programs for values that are not the model's own, the first time that they are given.
        self.add_given: Callable[[], None] = lambda: None
        self.recorder: Recorder | None = None
        # The inputs that a program computes with: released home shards among them are brought back first.
        self.reads: dict[ScheduleKey, tuple[int, ...]] = {}
        # The input of each graph that is the home shard of each key, with several ranks.
        self.shards: dict[Direction, dict[str, int]] = {}
        self._digest = f"{plan.digest()} {in_flight_bytes}"
        self._accumulates = False  # whether the last forward's backward will
        self._gathers = _stored(plan)
        self._is_resident = any(b.strategy.is_resident for b in plan.buckets)
        self._early: dict[ScheduleKey, list[tuple[Kind, int]]] = {}
        # As planned, not as plans show it once the host turned out to have no room: a rank that recompiles
        # alone must choose the same variants as the others.
        self._accumulated = [p.bucket for p in plan.placements if p.accumulates]
        self._trained = [r for b in plan.buckets if not b.frozen for r in model.records.of(b)]

    def forward(
        self, direction: Direction, args: list[Any], *, others: Sequence[str] = ()
    ) -> tuple[Any, ...]:
        """Run the forward (or inference) graph on `args`, which is emptied.

        others: the names of the parameters in whose places `args` has other values than the model's own.

        Raises: PlanMismatchError if another rank is about to run another plan; ArgumentError if ranks that
        share parameters have other batches.
        """
        model = self.living_model()
        model.batches.compare(direction, args)
        accumulates = direction is Direction.FORWARD and model.accumulation.is_on
        self._accumulates = accumulates
        with self._told(model, direction):
            with model.lanes.device.watching(f"the start of a {direction.value} pass"):
                variant = self._prepare(model, accumulates=accumulates, is_given=bool(others))
            if variant is not Variant.GIVEN:
                return self._run(model, (direction, variant), args, accumulates=accumulates)
            model.warn_of_given(others)
            places = self.shards[direction]
            used_again = self.shards.get(Direction.BACKWARD, {})
            mark = _mark([args[places[key]] for key in used_again])
            return self._run(model, (direction, variant), args, given=mark)

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """Run the backward graph on `args`, which is emptied.

        Raises: StaleParameterError if values that the forward was given have changed since.
        """
        model = self.living_model()
        model.optimizer_hooks.note_backward(accumulates=self._accumulates)
        with self._told(model, Direction.BACKWARD):
            given = self._given(model, args)
            variant = Variant.GIVEN if given else self._backward_variant(model, args)
            return self._run(model, (Direction.BACKWARD, variant), args, given=given)

    def _given(self, model: ShardedModel, args: list[Any]) -> int:
        """The mark of the values that a backward's forward was given; 0 if they were the model's own."""
        given = self.programs[Direction.BACKWARD, Variant.COLD].was_given(args)
        if given:
            shards = [args[i] for i in self.shards[Direction.BACKWARD].values()]
            is_changed = _mark(shards) != given
            act, what = "runs a backward of given values", "whether given values have changed"
            if any(Question(model.collectives, act, [is_changed], what).agreed()):
                raise StaleParameterError(
                    "values that a compiled function got instead of parameters changed between "
                    "its forward and its backward; run the backward before anything writes to them"
                )
        return given

    @contextmanager
    def _told(self, model: ShardedModel, direction: Direction) -> Iterator[None]:
        """Within it, errors name the pass and the step."""
        model.collectives.during = partial(self._tell, direction, model.counters.steps + 1)
        try:
            yield
        finally:
            model.collectives.during = told_alone

    def _tell(self, direction: Direction, step: int, name: str) -> str:
        buckets = {range_name(kind, b): (kind, b) for b in self.plan.buckets for kind in Kind}
        what = told_alone(name)
        if name in buckets:
            kind, bucket = buckets[name]
            more = ", …" if len(bucket.params) > 1 else ""
            what = f"{kind.value} of bucket {bucket.id} ({bucket.params[0].name}{more})"
        return f"the {direction.value} pass of step {step}, {what}"

    def _run(
        self,
        model: ShardedModel,
        key: ScheduleKey,
        args: list[Any],
        *,
        accumulates: bool = False,
        given: int = 0,
    ) -> tuple[Any, ...]:
        if key not in self.programs:
            add = self.add_given if key[1] is Variant.GIVEN else self.add_accumulation
            add()
        bring_back_inputs(args[i] for i in self.reads.get(key, ()))
        program = self.programs[key]
        buckets = model.bound[self.plan.graph]
        model.buckets.note_run(buckets)
        leading = [(kind, buckets[number]) for kind, number in self._startable(key)]
        model.seams.begin((self._digest, *key), leading)
        more: dict[str, Any] = {"accumulates": accumulates, "given": given}
        more["then"] = partial(model.seams.start_next, self._room_after(key))
        # A recording is of one program, and a budget has no room for the gradients of two.
        may_drain = not given and self.recorder is None and self.in_flight_bytes is None
        if key[0] is Direction.BACKWARD and may_drain and backward_number() != -1:
            more["drained"] = partial(_drained, key, model, self._trained)
        if self.recorder is None or given:
            return _watched(program, key, model, buckets, args, **more)
        with self.recorder.run(self.plan, key, program, model.lanes) as around:
            return _watched(program, key, model, buckets, args, around=around, **more)

    def _startable(self, key: ScheduleKey) -> list[tuple[Kind, int]]:
        """The transfers with which a schedule begins and that may start early; none without a schedule."""
        if key not in self._early:
            schedules = {(s.direction, s.variant): s for s in self.plan.schedules}
            buckets = {b.id: b for b in self.plan.buckets}
            steps = leading(schedules[key], buckets) if key in schedules else []
            self._early[key] = [(s.kind, s.bucket) for s in steps if s.bucket is not None]
        return self._early[key]

    def _room_after(self, key: ScheduleKey) -> int | None:
        """Bytes of the in-flight budget that a schedule leaves; None without a limit."""
        if self.in_flight_bytes is None:
            return None
        used = next(
            (s.in_flight_bytes for s in self.plan.schedules if (s.direction, s.variant) == key), 0
        )
        return self.in_flight_bytes - used

    def _backward_variant(self, model: ShardedModel, args: list[Any]) -> Variant:
        """The variant, from the forward's mode and from whether gradients wait; the same on all ranks."""
        cold = self.programs[Direction.BACKWARD, Variant.COLD]
        if not (model.accumulates and cold.is_stamped):
            return Variant.COLD
        # Also if no gradients of this graph wait: it tells other graphs whether this backward synchronises.
        accumulates = cold.shall_accumulate(args)
        model.accumulation.begin_graph(backward_number(), accumulates=accumulates)
        if accumulates:
            return Variant.ACCUMULATE if self._accumulated else Variant.COLD
        buckets = model.bound[self.plan.graph]
        waits = model.accumulation.waits_for([buckets[i] for i in self._accumulated])
        return Variant.COLLECT if waits else Variant.COLD

    def living_model(self) -> ShardedModel:
        model = self._model()
        if model is None:
            raise FcdpError("the sharded model no longer exists; its compiled function outlived it")
        return model

    def _prepare(self, model: ShardedModel, *, accumulates: bool, is_given: bool) -> Variant:
        """Agree with the other ranks, gather the stale copies that this graph only loads, choose the variant.

        given  a rank has other values
        cold   the strategy keeps nothing for the next forward, or all buckets that the cold graph stores are
               stale
        warm   else; stale buckets are gathered here first

        is_given: whether this rank was given other values than the model's own.
        """
        buckets = model.bound[self.plan.graph]
        relevant = [buckets[i] for i in (*self.plan.refresh, *self._gathers)]
        about = About(
            digest=self._digest,
            mode=ACCUMULATES if accumulates else SYNCHRONISES,
            describe=lambda: to_json(self.plan),
        )
        verdict = model.validity.check(
            relevant,
            about,
            is_given=is_given,
            early=model.seams.living(),
            is_outdated=model.seams.is_outdated,
        )
        if verdict.is_outdated:
            model.seams.cut()
        if verdict.is_given:
            return Variant.GIVEN
        if not self._is_resident:
            return Variant.COLD
        # Buckets that are kept until the backward only are gathered in any variant.
        resident = [b for b in relevant if b.bucket.strategy.is_resident]
        stale = [b for b in resident if verdict.stale[b.id]]
        kept = [b.id for b in resident if b.id in self._gathers]
        in_graph = [b for b in stale if b.id in kept]
        for bucket in buckets.values():
            if not bucket.placement.is_cached:
                model.buckets.release_rivals(bucket)
        cold = bool(in_graph) and len(in_graph) == len(kept)
        for bucket in stale:
            model.buckets.release_rivals(bucket)
            model.outside.give_way(bucket.keys)
            if not (cold and bucket.id in kept):
                _refresh(bucket, model)
        for bucket in resident:
            if bucket.bucket.frozen:
                bucket.release_shards()
        return Variant.COLD if cold else Variant.WARM


def _refresh(bucket: BoundBucket, model: ShardedModel) -> None:
    try:
        bucket.refresh()
    except BaseException:
        model.references.fail()  # other ranks may have stored what this rank lacks
        raise


def _watched(
    program: Program,
    key: ScheduleKey,
    model: ShardedModel,
    buckets: Mapping[int, BoundBucket],
    args: list[Any],
    **options: Any,
) -> tuple[Any, ...]:
    """Run a program; tell a device that checks its streams what comes before and after."""
    device = model.lanes.device
    if not device.is_checked:
        return program.run(model, buckets, args, **options)
    name = " ".join(part.value for part in key)
    trained = [r for r in model.records.values() if r.parameter().requires_grad]
    # An optimizer may have written to them.
    device.note([], [r.peek() for r in trained], f"what came before the {name} pass")
    with device.watching(f"the {name} pass"):
        results = program.run(model, buckets, args, **options)
    # Shards in host memory that a forward saves are read by loads only.
    on_host = {storage_id(r.peek()) for r in trained if r.spec.computes_on is not None}
    read = [r for r in results if isinstance(r, Tensor) and not isinstance(r, LateTensor)]
    read = [r for r in read if storage_id(r) not in on_host]
    device.note(read, [], f"what comes after the {name} pass")
    return results


def _drained(
    key: ScheduleKey,
    model: ShardedModel,
    trained: Sequence[ParamRecord],
    run: Callable[[], list[Tensor]],
    layouts: Sequence[MemoryLayout],
) -> list[Tensor]:
    """Leave a program's drain to the model; tell a device that checks its streams when it has run."""
    device = model.lanes.device
    if not device.is_checked:
        return model.drains.begin(run, layouts, trained)
    name = " ".join(part.value for part in key)

    def watched() -> list[Tensor]:
        with device.watching(f"the end of the {name} pass"):
            results = run()
        device.note(results, [], f"what comes after the {name} pass")
        return results

    return model.drains.begin(watched, layouts, trained)


def _mark(shards: list[Tensor]) -> int:
    """A fingerprint of given shards, which changes with their values; never 0."""
    bring_back_inputs(shards)
    return int(fingerprint(shards)) or 1 if shards else 1


def _stored(plan: Plan) -> tuple[int, ...]:
    """Ids of the buckets that a forward stores; it stores those kept until the backward in any variant."""
    return tuple(
        dict.fromkeys(
            step.bucket
            for schedule in plan.schedules
            for step in schedule.steps
            if step.kind is Kind.STORE and step.bucket is not None
        )
    )
