"""Run one traced graph with alike parameters: equal layers share a trace, each has a plan of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import Direction, Plan, Variant
from fcdp_compile.runtime.run import CompiledPlan

Keys = tuple[str | None, ...]
"""The keys of the parameters among a graph's inputs, in order; None for a tensor that is no home shard."""


class AlikePlans:
    """What Dynamo calls in place of one traced graph: it finds the plan for the parameters of the call.

    Equal layers share the trace.  Each set of parameters has a plan with buckets of its own, which is made in
    its first call.  All ranks call the same modules, so they make the same plans in the same order.

    first: the plan for the parameters that the graph was traced with.  places: where each direction's graph
    has which of them among its inputs.  make: a plan for other parameters, by the keys of the first plan's.
    """

    def __init__(
        self,
        first: CompiledPlan,
        places: Mapping[Direction, Mapping[str, int]],
        make: Callable[[Mapping[str, str]], CompiledPlan],
    ) -> None:
        self._first = first
        self._places = {d: tuple(found.values()) for d, found in places.items()}
        self._keys: dict[Direction, Keys] = {d: tuple(found) for d, found in places.items()}
        self._make = make
        self._plans = dict.fromkeys(self._keys.items(), first)
        # The keys of the latest plan with the first of its keys.
        self._latest = {(d, keys[0]): keys for d, keys in self._keys.items() if keys}
        self._by_number = {first.plan.graph: first}

    def forward(self, direction: Direction, args: list[Any]) -> tuple[Any, ...]:
        """Run the forward (or inference) graph on `args`, which is emptied.

        Raises: as `CompiledPlan.forward`.
        """
        keys = self._keys_among(direction, args)
        if (bound := self._plans.get((direction, keys))) is not None:
            return bound.forward(direction, args)
        if None not in keys:
            return self._add(direction, keys).forward(direction, args)
        bound = self._nearest(direction, keys)
        return bound.forward(direction, args, others=self._others(bound, direction, args))

    def backward(self, args: list[Any]) -> tuple[Any, ...]:
        """Run the backward of the forward that saved `args`, which is emptied.

        Raises: as `CompiledPlan.backward`.
        """
        program = self._first.programs[Direction.BACKWARD, Variant.COLD]
        if program.is_stamped:
            return self._plan_of(program.graph_of(args)).backward(args)
        # In a single process.
        keys = self._keys_among(Direction.BACKWARD, args)
        return self._plans.get((Direction.BACKWARD, keys), self._first).backward(args)

    def _plan_of(self, number: int) -> CompiledPlan:
        """The plan with this number; or the plan for the same parameters, if another trace has the number.

        Activation checkpointing may recompute a forward by another trace; the backward gets its stamps.

        Raises: FcdpError if there is neither.
        """
        if (bound := self._by_number.get(number)) is not None:
            return bound
        wanted = _names(self._first.living_model().plans[number])
        for other in self._by_number.values():
            if _names(other.plan) == wanted:
                return other
        raise FcdpError(
            "activation checkpointing computed a forward again with other parameters than before; call the "
            "same modules in the recomputation as in the forward"
        )

    def _keys_among(self, direction: Direction, args: list[Any]) -> Keys:
        shards = [args[i] for i in self._places.get(direction, ())]
        records = self._first.living_model().records
        for key in records.keys_at(shards[:1]):
            latest = self._latest.get((direction, key))
            if latest is not None and records.are_at(latest, shards):
                return latest
        return records.keys_at(shards)

    def _add(self, direction: Direction, keys: Keys) -> CompiledPlan:
        pairs = zip(self._keys[direction], keys, strict=True)
        now = {str(then): str(key) for then, key in pairs}
        made = self._make(now)
        for d, then in self._keys.items():
            mine = tuple(now.get(str(key), key) for key in then)
            self._plans[d, mine] = made
            self._latest |= {(d, key): mine for key in mine[:1]}
        self._by_number[made.plan.graph] = made
        return made

    def _nearest(self, direction: Direction, keys: Keys) -> CompiledPlan:
        """The plan with the first of these parameters; all ranks choose the same plan.

        Not every input has a key: other values took the places of parameters.
        """
        for i, key in enumerate(keys):
            for (d, known), bound in self._plans.items():
                if d is direction and key is not None and known[i] == key:
                    return bound
        return self._first

    def _others(self, bound: CompiledPlan, direction: Direction, args: list[Any]) -> list[str]:
        """The names of the parameters in whose places this rank was given other values.

        None in a single process, which gathers nothing.
        """
        model = bound.living_model()
        if model.topology.ranks == 1:
            return []
        keys = next(keys for (d, keys), b in self._plans.items() if d is direction and b is bound)
        places = self._places[direction]
        shards = {str(key): args[i] for key, i in zip(keys, places, strict=True)}
        return model.records.not_at_home(shards)


def _names(plan: Plan) -> set[str]:
    return {p.name for bucket in plan.buckets for p in bucket.params}
