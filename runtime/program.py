"""Run a lowered graph: a short loop over its nodes that makes no decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fcdp_compile import ops
from fcdp_compile.devices import Device
from fcdp_compile.errors import StaleParameterError
from fcdp_compile.plan import Kind
from fcdp_compile.plan.kinds import FETCHES, REDUCING
from fcdp_compile.plan.whole_step import drain_begins
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.collectives.agreement import Question
from fcdp_compile.runtime.lanes.tasks import Pending, passed_on
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.torch_compat.tensors import MemoryLayout

Call = Callable[[list[Any]], Any]
"""Runs one node on the values of a run."""

Instruction = tuple[Call, int, list[int]]
"""The call of a node, the place of its value, and the places of values that nobody needs after it."""

Around = Callable[[int, Call], Call]
"""Wraps the call of a step, which is given with its index."""

Drained = Callable[[Callable[[], list[Tensor]], Sequence[MemoryLayout]], list[Tensor]]
"""Takes a drain and the layouts of its results; returns the results (`Drains.begin`)."""


class Program:
    """A lowered graph that can run: explicit ops call the runtime, segments call compiled functions.

    Values are in numbered places and are dropped right after their last use.  A segment empties the list of
    its arguments, so no value outlives its last use inside a segment either.
    """

    def __init__(
        self,
        lowered: GraphModule,
        segments: dict[str, Callable[[list[Any]], Sequence[Any]]],
        *,
        number: int,
    ) -> None:
        self._number = number
        self._segments = segments
        nodes = list(lowered.graph.nodes)
        self._place = {node: i for i, node in enumerate(nodes)}
        self._inputs = [self._place[n] for n in nodes if n.op == "placeholder"]
        dead = last_uses(nodes)
        self._instructions: list[Instruction] = [
            (self._bind(n), self._place[n], [self._place[d] for d in dead.get(n, ())])
            for n in nodes
            if n.op not in ("placeholder", "output")
        ]
        self._kinds = [ops.kind_of(n) for n in nodes if n.op not in ("placeholder", "output")]
        # How many instructions there are up to the last fetch.
        self._fetching = max((i for i, k in enumerate(self._kinds, 1) if k in FETCHES), default=0)
        (output,) = nodes[-1].args
        ending = drain(nodes)
        self._drain_at = len(self._instructions) - len(ending)
        late = dict.fromkeys(o for o in output if o in ending)
        self._late = [self._place[o] for o in late]  # where the results are that the drain computes
        self._layouts: list[MemoryLayout] = []  # of these results, once they are known
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
        buckets: Mapping[int, BoundBucket],
        args: list[Any],
        *,
        accumulates: bool = False,
        given: int = 0,
        around: Around | None = None,
        then: Callable[[], None] = lambda: None,
        drained: Drained | None = None,
    ) -> tuple[Any, ...]:
        """Run on `args`, which is emptied.

        buckets: those of the plan, by number.
        accumulates: for a forward, whether its backward will accumulate gradients.
        given: the mark of the values that it runs on if they are not the model's own.
        around: wraps the steps of a run that is recorded.  then: called when all gathers have started.
        drained: takes the drain, to run it later ([Note: drains]); None to run it now.
        """
        instructions = self._instructions if around is None else self._with(around)
        run = RunState(model, buckets, accumulates=accumulates, given=given)
        values = self._start(run, args)
        if drained is not None and not self._layouts:
            drained = None
        before = len(instructions) if drained is None else self._drain_at
        with _clearing(values, model):
            _execute(instructions[: self._fetching], values)
            then()
            _execute(instructions[self._fetching : before], values)
            run.refuse_changed()
            model.home_transfers.settle()
            if drained is not None:
                late = drained(partial(self._drain, model, values), self._layouts)
                return self._results(values, dict(zip(self._late, late, strict=True)))
            self._layouts = [MemoryLayout.of(values[place]) for place in self._late]
        return self._results(values, {})

    def _drain(self, model: ShardedModel, values: list[Any]) -> list[Tensor]:
        """Run the drain on the values of the run before it; its results."""
        with _clearing(values, model):
            _execute(self._instructions[self._drain_at :], values)
            results = [values[place] for place in self._late]
            self._layouts = [MemoryLayout.of(result) for result in results]
            return results

    def _results(self, values: list[Any], late: dict[int, Tensor]) -> tuple[Any, ...]:
        return tuple(
            constant if place is None else late.get(place, values[place])
            for place, constant in zip(self._outputs, self._constants, strict=True)
        )

    def _with(self, around: Around) -> list[Instruction]:
        """The instructions, with the call of each step wrapped."""
        numbers = count()
        return [
            (call if kind is None else around(next(numbers), call), place, dead)
            for kind, (call, place, dead) in zip(self._kinds, self._instructions, strict=True)
        ]

    def _start(self, run: RunState, args: list[Any]) -> list[Any]:
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
        if node.op == "get_attr":  # a constant that is a result, such as a gradient's DeviceMesh
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
        target = node.target
        places = [self._place[a] for a in node.all_input_nodes]
        if target is ops.stamp:
            return partial(self._stamp, node.args[0])
        if target is ops.check:
            return partial(self._check, places[0], node.args[1])
        if target is ops.free:
            return lambda values: None
        if target is ops.wait:
            return lambda values: values[-1].model.exposure.wait(values[places[0]])
        act, number = _act_of(node), node.kwargs["bucket"]
        assert isinstance(number, int), number

        def call(values: list[Any]) -> Pending:
            run: RunState = values[-1]
            return act(run, run.buckets[number], *(values[place] for place in places))

        return call

    def _stamp(self, ids: Any, values: list[Any]) -> Tensor:
        run: RunState = values[-1]
        if not run.given:
            run.model.validity.notice(_uncached(ids, run))
        generations = (run.buckets[i].generation for i in ids)
        numbers = [int(run.accumulates), run.given, self._number, *generations]
        return torch.tensor(numbers, device="cpu")

    def _check(self, first: int, ids: Any, values: list[Any]) -> None:
        run: RunState = values[-1]
        if run.given:  # compared before the program began
            return
        generations = _stamped(values[first])[3:]
        # A cached bucket is checked when it is loaded: its copy may be of an older generation.
        run.generations.update(zip(ids, generations, strict=True))
        uncached = _uncached(ids, run)
        if not uncached:
            return
        run.model.validity.notice(uncached)
        changed = [b for b in uncached if b.generation != run.generations[b.id]]
        what = "the agreement on parameters that changed since the forward"
        # Ranks tell each other while the backward runs; it returns no gradients before it has the answer.
        act = "runs a backward that gathers again"
        run.changed = changed, Question(run.model.collectives, act, [bool(changed)], what)


def _act_of(node: Node) -> Callable[..., Pending]:
    """Starts the step of a node, given the run, the bucket and the values of the node's inputs."""
    kind, params = ops.kind_of(node), node.kwargs.get("params", ())
    assert kind is not None, node.target
    if kind is Kind.LOAD:
        return RunState.load
    if kind is Kind.LOAD_HOME:
        return lambda run, bucket, *shards: bucket.load_home(shards)
    if kind in FETCHES:
        return lambda run, bucket, *parts: run.gather(kind, bucket, *parts)
    if kind is Kind.STORE:
        return lambda run, bucket, shard: bucket.store(shard, run.generation(bucket))
    if kind is Kind.ACCUMULATE:
        return lambda run, bucket, total: run.model.accumulation.accumulate(bucket, params, total)
    if kind in REDUCING:
        return lambda run, bucket, grads: bucket.reduce(kind, grads, params)
    dtype = node.meta["val"].dtype
    if kind is Kind.STORE_GRADS:
        return lambda run, bucket, grads: bucket.store_grads(grads, dtype)
    assert kind is Kind.COLLECT, kind
    return lambda run, bucket, grads: run.model.accumulation.collect(bucket, params, grads, dtype)


def _execute(instructions: Sequence[Instruction], values: list[Any]) -> None:
    for call, place, dead in instructions:
        values[place] = call(values)
        for d in dead:
            values[d] = None


@contextmanager
def _clearing(values: list[Any], model: ShardedModel) -> Iterator[None]:
    """Within it, an error lets go of the values of a run and settles what has started."""
    try:
        yield
    except BaseException:
        values.clear()  # the error's traceback holds the run's frame, perhaps for long
        model.seams.fail()
        model.references.fail()
        model.lanes.settle()
        model.home_transfers.settle()
        raise


def _uncached(ids: Iterable[int], run: RunState) -> list[BoundBucket]:
    return [b for b in map(run.buckets.__getitem__, ids) if not b.placement.is_cached]


def _stamped(stamps: Tensor) -> list[int]:
    """The numbers that a forward stamped; they are on the host wherever the model is."""
    found: list[int] = stamps.tolist()
    return found


class RunState:
    """The state of one run of a program, which is in the last place of its values.

    accumulates: for a forward, whether its backward will accumulate gradients.
    given: the mark of the values that it was given if they are not the model's own, else 0.
    buckets: those of the plan that runs, by number.
    generations: for a backward, the generations that its forward stamped, by bucket id.
    changed: for a backward that gathers again, the buckets that changed on this rank since its forward, and
    the question whether buckets changed on any rank.
    """

    __slots__ = ("accumulates", "buckets", "changed", "generations", "given", "model")

    def __init__(
        self,
        model: ShardedModel,
        buckets: Mapping[int, BoundBucket],
        *,
        accumulates: bool,
        given: int,
    ) -> None:
        self.model = model
        self.buckets = buckets
        self.accumulates = accumulates
        self.given = given
        self.generations: dict[int, int] = {}
        self.changed: tuple[list[BoundBucket], Question] | None = None

    def generation(self, bucket: BoundBucket) -> int:
        """The stamped generation in a backward, the current one in a forward."""
        stamped = self.generations.get(bucket.id)
        return bucket.generation if stamped is None else stamped

    def gather(self, kind: Kind, bucket: BoundBucket, *parts: Tensor | Pending) -> Pending:
        """Start one step of a gather, unless it has started before the program (`seams`)."""
        part = parts[0]
        if kind is Kind.INTRA_ALL_GATHER and isinstance(part, Pending) and part.is_full:
            self.model.counters.add(kind, 0)
            return passed_on(part)
        result = self._started(kind, bucket) or bucket.gather(kind, *parts)
        if kind in (Kind.INTRA_ALL_GATHER, Kind.INTRA_REST_ALL_GATHER):
            bucket.cache.keep_full(result, self.generation(bucket))
        return result

    def load(self, bucket: BoundBucket) -> Pending:
        """Start to load the bucket's copy, unless that has started before the program."""
        return self._started(Kind.LOAD, bucket) or bucket.load(self.generation(bucket))

    def _started(self, kind: Kind, bucket: BoundBucket) -> Pending | None:
        # Ranks take alike what they gathered between nodes: a change of its values on any rank is refused
        # on all ranks (`refuse_changed`).
        generation = self.generations.get(bucket.id) if bucket.placement.is_cached else None
        return self.model.seams.take(kind, bucket, generation)

    def refuse_changed(self) -> None:
        """At the end of a backward, raise if it may have gathered other values than its forward.

        Raises: StaleParameterError on every rank.
        """
        if self.changed is None:
            return
        changed, question = self.changed
        if not any(question.agreed()):
            return
        where = "another rank"
        if changed:
            where = f"bucket {changed[0].id} ({changed[0].bucket.params[0].name}, …)"
        raise StaleParameterError(
            f"parameters of {where} changed between the forward and its backward; run the backward before "
            "the optimizer steps or anything else writes to them"
        )


def last_uses(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """For each node, the nodes whose values nobody needs after it; outputs are needed for ever."""
    dying: dict[Node, list[Node]] = {}
    seen: set[Node] = set(nodes[-1].all_input_nodes)
    for node in reversed(nodes[:-1]):
        for used in [*node.all_input_nodes, node]:
            if used not in seen:
                seen.add(used)
                dying.setdefault(node, []).append(used)
    return dying


def drain(nodes: Sequence[Node]) -> list[Node]:
    """The last nodes before the output that belong to the drain (`runtime.drains`)."""
    place = {node: at for at, node in enumerate(nodes)}
    steps = nodes[:-1]
    inputs = [[place[i] for i in node.all_input_nodes] for node in steps]
    return list(steps[drain_begins([ops.kind_of(node) for node in steps], inputs) :])
