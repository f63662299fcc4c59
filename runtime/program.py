"""Run a lowered graph: a short loop over its nodes that makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fcdp_compile import ops
from fcdp_compile.devices import Device
from fcdp_compile.errors import StaleParameterError
from fcdp_compile.plan import Bucket, Kind
from fcdp_compile.plan.reduction import REDUCING
from fcdp_compile.runtime.collectives.agreement import Question
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.lanes.lanes import range_name
from fcdp_compile.runtime.lanes.pending import Pending, passed_on
from fcdp_compile.runtime.model import ShardedModel

_GATHERS: dict[Kind, Callable[[Collectives], Callable[..., Pending]]] = {
    Kind.INTER_ALL_GATHER: lambda collectives: collectives.all_gather,
    Kind.INTRA_OWN_ALL_GATHER: lambda collectives: collectives.own_all_gather,
    Kind.FLAT_ALL_GATHER: lambda collectives: collectives.flat_all_gather,
}
"""The kinds of gathers that may send another format."""
_FETCHES = (*_GATHERS, Kind.LOAD, Kind.INTRA_ALL_GATHER, Kind.INTRA_REST_ALL_GATHER)

Call = Callable[[list[Any]], Any]
"""Runs one node on the values of a run."""

Around = Callable[[int, Call], Call]
"""Wraps the call of a step, which is given with its index."""


class _Run:
    """The state of a run, which is in the last place of its values.

    accumulates: for a forward, whether its backward will accumulate gradients.
    given: the mark of the values that it was given if they are not the model's own, else 0.
    generations: for a backward, the generations that its forward stamped, by bucket id.
    changed: for a backward that gathers again, the buckets that changed on this rank since its forward, and
    the question whether buckets changed on any rank.
    """

    __slots__ = ("accumulates", "changed", "generations", "given", "model")

    def __init__(self, model: ShardedModel, *, accumulates: bool, given: int) -> None:
        self.model = model
        self.accumulates = accumulates
        self.given = given
        self.generations: dict[int, int] = {}
        self.changed: tuple[list[Bucket], Question] | None = None

    def generation(self, bucket: Bucket) -> int:
        """The stamped generation in a backward, the current one in a forward."""
        stamped = self.generations.get(bucket.id)
        return self.model.validity.generation(bucket) if stamped is None else stamped

    def started(self, kind: Kind, bucket: Bucket) -> Pending | None:
        """The transfer, if it has started before the program (`seams`)."""
        return self.model.seams.take(kind, bucket, self.generations.get(bucket.id))

    def refuse_changed(self) -> None:
        """At the end of a backward, raise if it may have gathered other values than its forward.

        Raises: StaleParameterError on every rank.
        """
        if self.changed is None:
            return
        changed, question = self.changed
        if not any(question.agreed()):
            return
        where = (
            f"bucket {changed[0].id} ({changed[0].params[0].name}, …)"
            if changed
            else "another rank"
        )
        raise StaleParameterError(
            f"parameters of {where} changed between the forward and its backward; run the backward before "
            "the optimizer steps or anything else writes to them"
        )


class Program:
    """A lowered graph that can run: explicit ops call the runtime, segments call compiled functions.

    Values are in numbered places and are dropped right after their last use.  A segment empties the list of
    its arguments, so no value outlives its last use inside a segment either.
    """

    def __init__(
        self,
        lowered: GraphModule,
        segments: dict[str, Callable[[list[Any]], Sequence[Any]]],
        buckets: dict[int, Bucket],
        *,
        number: int,
    ) -> None:
        self._number = number
        self._buckets = buckets
        self._segments = segments
        nodes = list(lowered.graph.nodes)
        self._place = {node: i for i, node in enumerate(nodes)}
        self._inputs = [self._place[n] for n in nodes if n.op == "placeholder"]
        dead = _last_uses(nodes)
        self._instructions = [
            (self._bind(n), self._place[n], [self._place[d] for d in dead.get(n, ())])
            for n in nodes
            if n.op not in ("placeholder", "output")
        ]
        self._kinds = [ops.kind_of(n) for n in nodes if n.op not in ("placeholder", "output")]
        self._last_fetch = max((i for i, k in enumerate(self._kinds) if k in _FETCHES), default=-1)
        (output,) = nodes[-1].args
        self._outputs = [self._place[o] if isinstance(o, Node) else None for o in output]
        self._constants = [None if isinstance(o, Node) else o for o in output]
        self._unused = [self._place[n] for n in nodes if n.op == "placeholder" and not n.users]
        self._stamps = [
            self._inputs.index(self._place[n.args[0]]) for n in nodes if n.target is ops.check
        ]

    @property
    def kinds(self) -> list[Kind]:
        """The kinds of its steps, in the order of the schedule."""
        return [kind for kind in self._kinds if kind is not None]

    @property
    def is_stamped(self) -> bool:
        """Whether a backward has the stamps of its forward; if it needs no parameter, it has none."""
        return bool(self._stamps)

    def shall_accumulate(self, args: list[Any]) -> bool:
        """Whether the forward of a backward that is about to run on `args` was told to accumulate."""
        return any(_stamped(args[i])[0] for i in self._stamps)

    def was_given(self, args: list[Any]) -> int:
        """The mark of the values that a backward's forward was given; 0 if they were the model's own."""
        return max((_stamped(args[i])[1] for i in self._stamps), key=abs, default=0)

    def graph_of(self, args: list[Any]) -> int:
        """The number of the plan that a backward's forward ran; only if it is stamped."""
        return _stamped(args[self._stamps[0]])[2]

    def run(
        self,
        model: ShardedModel,
        args: list[Any],
        *,
        accumulates: bool = False,
        given: int = 0,
        around: Around | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> tuple[Any, ...]:
        """Run on `args`, which is emptied.

        accumulates: for a forward, whether its backward will accumulate gradients.
        given: the mark of the values that it runs on if they are not the model's own.
        around: wraps the steps of a run that is recorded.  then: called when all gathers have started.
        """
        instructions = self._instructions if around is None else self._with(around)
        run = _Run(model, accumulates=accumulates, given=given)
        values = self._start(run, args)
        try:
            if self._last_fetch < 0:
                then()
            for i, (call, place, dead) in enumerate(instructions):
                values[place] = call(values)
                for d in dead:
                    values[d] = None
                if i == self._last_fetch:
                    then()
            run.refuse_changed()
        except BaseException:
            values.clear()  # the error's traceback holds this frame, perhaps for long
            model.seams.fail()
            model.lanes.settle()
            raise
        return tuple(
            constant if place is None else values[place]
            for place, constant in zip(self._outputs, self._constants, strict=True)
        )

    def _with(self, around: Around) -> list[tuple[Call, int, list[int]]]:
        """The instructions, with the call of each step wrapped."""
        numbers = count()
        return [
            (call if kind is None else around(next(numbers), call), place, dead)
            for kind, (call, place, dead) in zip(self._kinds, self._instructions, strict=True)
        ]

    def _start(self, run: _Run, args: list[Any]) -> list[Any]:
        """The values before the first node; a function, so that its local `value` keeps nothing alive."""
        values: list[Any] = [None] * len(self._place) + [run]
        for place, value in zip(self._inputs, args, strict=True):
            values[place] = value
        args.clear()
        for place in self._unused:
            values[place] = None
        return values

    def _bind(self, node: Node) -> Call:
        if node.op == "call_module":
            return self._bind_segment(node)
        if (
            node.op == "get_attr"
        ):  # a constant that is a result, such as the DeviceMesh of a gradient
            constant = getattr(node.graph.owning_module, str(node.target))
            return lambda values: constant
        if node.target in ops.EXPLICIT:
            return self._bind_explicit(node)
        function: Any = node.target  # here it is a getitem on a segment's results
        source: Any
        source, index = node.args
        at = self._place[source]
        return lambda values: function(values[at], index)

    def _bind_segment(self, node: Node) -> Call:
        name = str(node.target)
        segment = self._segments[name]
        places = [self._place[a] for a in node.args]
        now = self._place[node]
        last = {
            self._place[a]
            for a in node.all_input_nodes
            if all(self._place[user] <= now for user in a.users)
        }

        def call(values: list[Any]) -> Any:
            args = [values[p] for p in places]
            for p in last:
                values[p] = None
            device: Device = values[-1].model.lanes.device
            return device.launch(segment, args, name)

        return call

    def _bind_explicit(self, node: Node) -> Call:
        target, kwargs = node.target, node.kwargs
        first = self._place[node.args[0]] if node.args and isinstance(node.args[0], Node) else -1
        if target is ops.stamp:
            return partial(self._stamp, node.args[0])
        if target is ops.check:
            return partial(self._check, first, node.args[1])
        if target is ops.free:
            return _nothing
        if target is ops.wait:
            return lambda values: values[first].wait()
        bucket_id = kwargs["bucket"]
        assert isinstance(bucket_id, int), bucket_id
        assert callable(target), target
        bucket = self._buckets[bucket_id]
        if target is ops.load:
            return partial(self._load, bucket)
        if target is ops.store:
            return partial(self._store, bucket, first)
        params: Any = kwargs.get("params", ())
        if target in (ops.collect, ops.accumulate):
            if target is ops.accumulate:
                return partial(self._accumulate, bucket, params, first)
            return partial(self._collect, bucket, params, first, node.meta["val"].dtype)
        kind = ops.EXPLICIT[target]
        assert kind is not None, target
        name = range_name(kind, bucket)
        if kind is Kind.INTRA_ALL_GATHER:
            return partial(self._spread, bucket, first, name)
        if kind in _GATHERS:
            return partial(self._gather, bucket, kind, first, name)
        if kind is Kind.INTRA_REST_ALL_GATHER:
            return partial(self._spread_rest, bucket, first, self._place[node.args[1]], name)
        assert kind in REDUCING, kind
        return partial(self._reduce, bucket, kind, params, first, name)

    def _gather(
        self, bucket: Bucket, kind: Kind, first: int, name: str, values: list[Any]
    ) -> Pending:
        run: _Run = values[-1]
        if (started := run.started(kind, bucket)) is not None:
            return started
        codec = run.model.codecs.of_weights(bucket)
        return _GATHERS[kind](run.model.collectives)(kind, values[first], name, codec=codec)

    def _reduce(
        self,
        bucket: Bucket,
        kind: Kind,
        params: tuple[str, ...],
        first: int,
        name: str,
        values: list[Any],
    ) -> Pending:
        model: ShardedModel = values[-1].model
        is_encoded = kind is Kind.INTER_REDUCE_SCATTER
        codec = model.codecs.of_gradients(bucket, params) if is_encoded else None
        return model.collectives.reduction(kind, values[first], name, codec=codec)

    def _load(self, bucket: Bucket, values: list[Any]) -> Pending:
        run: _Run = values[-1]
        if (loaded := run.started(Kind.LOAD, bucket)) is None:
            loaded = run.model.cache.load(bucket, run.generation(bucket))
            run.model.cache.make_room(bucket)
        return loaded

    def _store(self, bucket: Bucket, first: int, values: list[Any]) -> Pending:
        run: _Run = values[-1]
        return run.model.cache.store(bucket, values[first], run.generation(bucket))

    def _spread(self, bucket: Bucket, first: int, name: str, values: list[Any]) -> Pending:
        part, run = values[first], values[-1]
        if isinstance(part, Pending) and part.is_full:
            run.model.counters.add(Kind.INTRA_ALL_GATHER, 0)
            return passed_on(part)
        kind = Kind.INTRA_ALL_GATHER
        full: Pending = run.started(kind, bucket) or run.model.collectives.all_gather(
            kind, part, name
        )
        run.model.cache.keep_full(bucket, run.generation(bucket), full)
        return full

    def _spread_rest(
        self, bucket: Bucket, first: int, own: int, name: str, values: list[Any]
    ) -> Pending:
        run: _Run = values[-1]
        kind = Kind.INTRA_REST_ALL_GATHER
        full = run.model.collectives.rest_all_gather(kind, values[first], values[own], name)
        run.model.cache.keep_full(bucket, run.generation(bucket), full)
        return full

    def _collect(
        self,
        bucket: Bucket,
        params: tuple[str, ...],
        first: int,
        dtype: torch.dtype,
        values: list[Any],
    ) -> Pending:
        run: _Run = values[-1]
        return run.model.accumulation.collect(bucket, params, values[first], dtype)

    def _accumulate(
        self, bucket: Bucket, params: tuple[str, ...], first: int, values: list[Any]
    ) -> Pending:
        run: _Run = values[-1]
        return run.model.accumulation.accumulate(bucket, params, values[first])

    def _stamp(self, ids: Any, values: list[Any]) -> Tensor:
        run: _Run = values[-1]
        buckets = [self._buckets[i] for i in ids]
        if not run.given:
            run.model.validity.notice(_uncached(buckets, run.model))
        generations = [run.model.validity.generation(b) for b in buckets]
        numbers = [int(run.accumulates), run.given, self._number, *generations]
        return torch.tensor(numbers, device="cpu")

    def _check(self, first: int, ids: Any, values: list[Any]) -> None:
        run: _Run = values[-1]
        if run.given:  # compared before the program began
            return
        generations = _stamped(values[first])[3:]
        # A cached bucket is checked when it is loaded: its copy may be of an older generation.
        run.generations.update(zip(ids, generations, strict=True))
        uncached = _uncached([self._buckets[i] for i in ids], run.model)
        if not uncached:
            return
        run.model.validity.notice(uncached)
        generation = run.model.validity.generation
        changed = [b for b in uncached if generation(b) != run.generations[b.id]]
        what = "the agreement on parameters that changed since the forward"
        # Ranks tell each other while the backward runs; it returns no gradients before it has the answer.
        act = "runs a backward that gathers again"
        run.changed = changed, Question(run.model.collectives, act, [bool(changed)], what)


def _uncached(buckets: Sequence[Bucket], model: ShardedModel) -> list[Bucket]:
    return [b for b in buckets if not model.placements[b.id].is_cached]


def _stamped(stamps: Tensor) -> list[int]:
    """The numbers that a forward stamped; they are on the host wherever the model is."""
    found: list[int] = stamps.tolist()
    return found


def _nothing(values: list[Any]) -> None:
    return None


def _last_uses(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """For each node, the nodes whose values nobody needs after it; outputs are needed for ever."""
    dying: dict[Node, list[Node]] = {}
    seen: set[Node] = set(nodes[-1].all_input_nodes)
    for node in reversed(nodes[:-1]):
        for used in [*node.all_input_nodes, node]:
            if used not in seen:
                seen.add(used)
                dying.setdefault(node, []).append(used)
    return dying
