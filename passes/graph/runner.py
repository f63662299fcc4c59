"""Run passes one after the other; check and time each pass and, if asked, keep its result as text.

The runner knows no pass by name.  A pass is a function of a graph and a context that returns a graph, or it
decides about the parameters that a graph gathers and changes no graph; `watched` runs passes of other kinds,
such as a pass that makes two graphs of one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from torch.fx import GraphModule

from fcdp_compile.ops import UNSHARD
from fcdp_compile.passes.graph.context import PassContext, Uses, keys_of
from fcdp_compile.plan.stages import OpChange, Stage

log = logging.getLogger(__name__)

Pass = Callable[[GraphModule, PassContext], GraphModule]
Decision = Callable[[Collection[str], PassContext], Uses]
Stages = list[Stage]
"""The stages of one compilation, in the order in which they were made."""


def run(
    passes: Iterable[Pass],
    gm: GraphModule,
    ctx: PassContext,
    *,
    graph: str,
    stages: Stages | None = None,
) -> GraphModule:
    """Run passes on a graph; they may change it.

    graph: the graph's name in the stages.  stages: gets each stage, if given.
    """
    for one in passes:

        def change(one: Pass = one, gm: GraphModule = gm) -> dict[str, GraphModule]:
            return {graph: one(gm, ctx)}

        gm = watched(one.__name__, {graph: gm}, change, stages)[graph]
    return gm


def decide(
    one: Decision,
    gm: GraphModule,
    ctx: PassContext,
    *,
    graph: str,
    stages: Stages | None = None,
) -> Uses:
    """Run a pass that decides; return what it has decided for each key of the graph.

    graph, stages: as for `run`.
    """
    uses: dict[str, Uses] = {}

    def change() -> dict[str, GraphModule]:
        uses[graph] = one(keys_of(gm, UNSHARD), ctx)
        return {graph: gm}

    watched(one.__name__, {graph: gm}, change, stages, uses)
    return uses[graph]


def watched(
    name: str,
    before: Mapping[str, GraphModule],
    change: Callable[[], Mapping[str, GraphModule]],
    stages: Stages | None = None,
    uses: Mapping[str, Uses] = MappingProxyType({}),
) -> Mapping[str, GraphModule]:
    """Call `change`, which changes graphs or makes new graphs; check, time and keep the results.

    before: the graphs that it is given, by their names in the stages; new graphs are compared with the first.
    uses: of the results' parameters, by the names of the graphs, as far as they are decided.
    """
    is_told = stages is not None or log.isEnabledFor(logging.DEBUG)
    counts = {title: _ops(gm) for title, gm in before.items()} if is_told else {}
    began_s = time.perf_counter()
    after = change()
    took_s = time.perf_counter() - began_s
    for title, gm in after.items():
        gm.graph.lint()
        if not is_told:
            continue
        changes = _changes(counts.get(title, next(iter(counts.values()))), _ops(gm))
        told = ", ".join(map(str, changes)) or "no op"
        log.debug("%s, %s graph: %.1f ms, %s", name, title, 1e3 * took_s, told)
        if stages is not None:
            text = _text(gm, uses.get(title, {}))
            stages.append(Stage(name=name, graph=title, time_s=took_s, ops=changes, text=text))
    return after


def _ops(gm: GraphModule) -> Counter[str]:
    """How often each op is called; all segments count as one op."""
    calls = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    return Counter("segment" if n.op == "call_module" else _name(n.target) for n in calls)


def _name(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") else getattr(target, "__name__", str(target))


def _changes(before: Counter[str], after: Counter[str]) -> tuple[OpChange, ...]:
    """The ops whose number changed, largest change first."""
    found = {op: after[op] - before[op] for op in before | after}
    order = sorted((-abs(n), op) for op, n in found.items() if n)
    return tuple(
        OpChange(op=op, more=max(0, found[op]), less=max(0, -found[op])) for _, op in order
    )


def _text(gm: GraphModule, uses: Uses) -> str:
    """The graph as code, and the buckets and sources that passes have chosen."""
    unshards = gm.graph.find_nodes(op="call_function", target=UNSHARD) if uses else []
    found = [(n.name, uses[str(n.args[1])]) for n in unshards]
    lines = [
        f"# {name}: bucket {use.bucket.id}" + (f", {use.source.value}" if use.source else "")
        for name, use in found
    ]
    return "\n".join([gm.print_readable(print_output=False), *lines])
