"""Tell what a schedule moves and why, in plain words for somebody who has never seen a plan.

The text depends on kinds, tiers and bytes only, never on the name of a strategy.
"""

from __future__ import annotations

from collections.abc import Collection
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

from fcdp_compile.plan import Bucket, Direction, Kind, Placement, Plan, Schedule, Tier
from fcdp_compile.plan.kinds import Flow

_Placed = list[tuple[Bucket, Placement]]
"""Buckets, each with its placement."""


class Story(NamedTuple):
    """One sentence with the main point, and the reasons for it."""

    headline: str
    text: str


def moved(schedule: Schedule) -> dict[Flow, int]:
    """Bytes that one rank sends or copies in a run of a schedule, for every flow."""
    totals = dict.fromkeys(Flow, 0)
    for kind, size in schedule.bytes_by_kind().items():
        assert kind.flow is not None, "it moves bytes"
        totals[kind.flow] += size
    return totals


def tell_sharding(plan: Plan) -> str:
    """Tell which part of the parameters each rank owns, and what must happen before a layer can compute."""
    cuts = {(b.nodes, b.ranks_per_node) for b in plan.buckets}
    shape = f"{_count(plan.nodes, 'node')} of {_count(plan.ranks_per_node, 'rank')}"
    if not cuts:
        return f"{shape}; no parameter is sharded."
    if len(cuts) > 1:
        return f"{shape}; parameters are cut over different numbers of ranks, as their buckets say."
    ((nodes, ranks_per_node),) = cuts
    if nodes * ranks_per_node == 1:
        return f"{shape}; every rank has the whole of every parameter."
    owned = f"{shape}; each rank owns 1/{nodes * ranks_per_node} of every parameter"
    if nodes == 1:
        return f"{owned}, each node all of them. To compute a layer, its parts come together within the node."
    if ranks_per_node == 1:
        return f"{owned}. To compute a layer, its parts come together between nodes."
    return (
        f"{owned}. To compute a layer, its parts come together: between nodes over the slow network, then "
        "within the node over fast links."
    )


def tell(plan: Plan, schedule: Schedule) -> Story:
    """Tell what a schedule sends between nodes, and where all other parameters come from."""
    if schedule.direction is Direction.BACKWARD:
        return _tell_backward(plan, schedule)
    return _tell_forward(plan, schedule)


def readable_bytes(size_bytes: int) -> str:
    """Bytes for people: three digits, in the largest unit that is not above them."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if (size := size_bytes / unit) >= 1:
            return f"{_rounded(size, 2 if size < 10 else 1 if size < 100 else 0)} {name}"
    return f"{size_bytes} B"


def _rounded(number: float, digits: int) -> str:
    # Halves are rounded away from zero, as in the page's script: equal bytes must read the same in both.
    return str(Decimal(number).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


_ON_THE_NODE = "All its parameters are on the node already."


def _tell_forward(plan: Plan, schedule: Schedule) -> Story:
    name = "evaluation" if schedule.direction is Direction.INFERENCE else "forward"
    gathered, loaded = _buckets(plan, schedule, {Kind.INTER_ALL_GATHER}), _loaded(plan, schedule)
    if not gathered:
        kept = (
            f"No parameter has changed since it was gathered: {_use(loaded)}."
            if loaded
            else _ON_THE_NODE
        )
        return Story(f"The {name} gathers nothing between nodes.", kept)
    sent = moved(schedule)[Flow.WEIGHTS_BETWEEN]
    text = _what_is_kept(gathered, _buckets(plan, schedule, {Kind.STORE}))
    if loaded:
        text += f" The other parameters have not changed since they were gathered: {_use(loaded)}."
    return Story(f"The {name} gathers {readable_bytes(sent)} a rank between nodes.", text)


def _what_is_kept(gathered: _Placed, stored: _Placed) -> str:
    if not stored:
        return "No copy is kept: a gathered parameter lives for one use."
    kept = (
        f"Each rank keeps what it gathered ({readable_bytes(_kept_bytes(stored))}) {_where(stored)}"
    )
    if left := len(gathered) - len(stored):
        kept += f", except for {left} of {_count(len(gathered), 'bucket')}"
    return f"{kept}: the next use of the kept parameters needs no other node."


def _tell_backward(plan: Plan, schedule: Schedule) -> Story:
    gathered, loaded = _buckets(plan, schedule, {Kind.INTER_ALL_GATHER}), _loaded(plan, schedule)
    used = _buckets(
        plan, schedule, {k for k in Kind if k.flow is not None and k.flow.is_of_weights}
    )
    flows = moved(schedule)
    if gathered:
        whole = len(gathered) == len(used)
        what = "every parameter" if whole else f"{len(gathered)} of {_count(len(used), 'bucket')}"
        sent = readable_bytes(flows[Flow.WEIGHTS_BETWEEN])
        text = [
            f"{sent} a rank cross the slow network a second time, as the forward did not keep them."
        ]
        text += [_waited(plan, loaded)] if loaded else []
        return Story(
            f"The backward gathers {what} between nodes again.",
            " ".join([*text, _gradients(schedule, used, "Gradients cross, too")]),
        )
    verb = "gathers" if flows[Flow.GRADIENTS_BETWEEN] else "sends"
    text = [_waited(plan, loaded) if loaded else _ON_THE_NODE]
    return Story(
        f"The backward {verb} nothing between nodes.",
        " ".join([*text, _gradients(schedule, used, "Only gradients cross")]),
    )


def _waited(plan: Plan, loaded: _Placed) -> str:
    """Tell where the parameters were that a backward need not gather."""
    earlier = [p for p in loaded if p[0].id in plan.refresh]
    fresh = [p for p in loaded if p[0].id not in plan.refresh]
    sources = (
        [f"what the forward gathered ({readable_bytes(_kept_bytes(fresh))} a rank)"]
        if fresh
        else []
    )
    if earlier:
        size = readable_bytes(_kept_bytes(earlier))
        sources.append(f"what was gathered before the first step and never changed ({size} a rank)")
    sentence = f"{' and '.join(sources)} waited {_where(loaded)} and is {_fetched(loaded)}."
    return sentence[0].upper() + sentence[1:]


def _gradients(schedule: Schedule, used: _Placed, cross: str) -> str:
    if sent := moved(schedule)[Flow.GRADIENTS_BETWEEN]:
        return f"{cross}: {readable_bytes(sent)} a rank."
    if any(s.kind is Kind.ACCUMULATE for s in schedule.steps):
        return "Gradients do not cross: they wait for the gradients of the next micro-batch."
    if used and all(b.frozen for b, _ in used):
        return "There are no gradients to send, as no parameter here is trained."
    return "No gradient crosses."


def _use(loaded: _Placed) -> str:
    return f"{readable_bytes(_kept_bytes(loaded))} a rank waited {_where(loaded)} and is {_fetched(loaded)}"


def _fetched(loaded: _Placed) -> str:
    on_host = [p for _, p in loaded if p.tier is Tier.HOST]
    if len(on_host) == len(loaded):
        return "loaded over the bus"
    return "loaded from there over the bus" if on_host else "used where it is"


def _where(kept: _Placed) -> str:
    tiers = {p.tier for _, p in kept}
    if tiers <= {Tier.HOST}:
        return "in host memory"
    return "partly on the GPU, partly in host memory" if Tier.HOST in tiers else "on the GPU"


def _kept_bytes(kept: _Placed) -> int:
    sizes = {Tier.HOST: "host_bytes", Tier.GPU: "node_bytes", Tier.GPU_FULL: "full_bytes"}
    return sum(getattr(b, sizes.get(p.tier, "node_bytes")) for b, p in kept)


def _loaded(plan: Plan, schedule: Schedule) -> _Placed:
    return _buckets(plan, schedule, {Kind.LOAD})


def _buckets(plan: Plan, schedule: Schedule, kinds: Collection[Kind]) -> _Placed:
    """The buckets that steps of these kinds use, without repetitions."""
    ids = {s.bucket for s in schedule.steps if s.kind in kinds}
    return [pair for pair in plan.placed if pair[0].id in ids]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
