"""Count the bytes of device memory that are alive while each node of a graph runs; no graph is changed.

    node                      alive while it runs
    inter_all_gather(home)    home, node shard          a started step's result exists, and both are held
    intra_all_gather          node shard, full bucket     until a wait comes after the step
    wait                      node shard, full bucket
    ...
    segment                   one entry for each node inside
    free(full)                full bucket               the last entry that has it

Memory is counted by storage: views share one.  Symbolic sizes (batch, sequence length) count with the values
that the caller gives.  Memory that a collective takes for itself, as long as it holds its inputs, is noted on
its node: parts that arrive before they are summed or put in order, and encoded and decoded values.  What
kernels and Gloo take for themselves (workspaces, staging) is in no graph and is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fcdp_compile import ops
from fcdp_compile.passes.graph.context import META, StepMeta
from fcdp_compile.plan import Lane
from fcdp_compile.plan.lane_clocks import Clock, LaneClocks
from fcdp_compile.torch_compat.tensors import storage_id

Bytes: TypeAlias = int | sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The bytes alive while one node runs: arguments, result, and all values that later nodes need.

    node: its name, for people.  at: the number in the graph, from 0, of the node or of the segment around it.
    step: its op, or its kind of step.  bucket: the bucket of an explicit node.
    """

    node: str
    at: int
    step: str
    bucket: int | None
    bytes: int


class Lifetimes:
    """When each storage of a graph is alive on the device, whatever the sizes.

    elsewhere: storages (`storage_id`) that stay alive whatever the graph does, such as home shards and the
    caller's batch; they are not counted.  Any other input, such as a value saved for a backward, lives from
    the start to its last use; results live to the end.

    Requires: fake `val`s on all nodes whose results are tensors; explicit nodes or none.
    """

    def __init__(self, gm: GraphModule, *, elsewhere: Collection[int], device_type: str) -> None:
        events = list(_events(gm))
        self._count = len(events)
        self._lives = list(_lives(events, elsewhere, device_type).values())
        self._nodes = [
            (i, Alive(node=n.name, at=e.at, step=_step(n), bucket=_bucket(n), bytes=0))
            for i, e in enumerate(events)
            if (n := e.node).op not in ("placeholder", "output")
        ]

    def alive(self, sizes: Mapping[sympy.Symbol, int]) -> tuple[Alive, ...]:
        """The bytes alive while each node but inputs and output runs, in order.

        sizes: values of the symbols in sizes.
        """
        change = [0] * (self._count + 1)
        found: dict[Bytes, int] = {}  # few of the thousands of sizes differ
        for life in self._lives:
            if life.bytes not in found:
                found[life.bytes] = evaluate(life.bytes, sizes)
            change[life.born] += found[life.bytes]
            change[life.dies + 1] -= found[life.bytes]
        now = list(accumulate(change))
        return tuple(replace(node, bytes=now[i]) for i, node in self._nodes)


def evaluate(size: Bytes, hints: Mapping[sympy.Symbol, int]) -> int:
    """Bytes of a size for given values of its symbols; a symbol without a value depends on data, and is 0."""
    if isinstance(size, int):
        return size
    values = {s: hints.get(s, 0) for s in size.free_symbols}
    return int(size.xreplace(values))


def storages(values: Iterable[object], device_type: str) -> dict[int, Bytes]:
    """The storages of the values that are tensors on the device, each with its bytes."""
    found: dict[int, Bytes] = {}
    for value in values:
        if isinstance(value, Tensor) and value.device.type == device_type:
            found[storage_id(value)] = _bytes(value)
    return found


def hints_of(gm: GraphModule) -> dict[sympy.Symbol, int]:
    """The values that a graph's symbols had when it was traced."""
    found: dict[sympy.Symbol, int] = {}
    for node in gm.graph.nodes:
        val = node.meta.get("val")
        sizes: list[Any] = list(val.shape) if isinstance(val, Tensor) else [val]
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            if size.node.expr.is_symbol and size.node.has_hint():
                found[size.node.expr] = int(size.node.hint)
    return found


@dataclass(slots=True)
class _Event:
    """A node in the order of execution; the nodes inside a segment replace the segment's call."""

    node: Node
    at: int
    uses: list[object]
    makes: list[object]


@dataclass(slots=True)
class _Life:
    """First and last event that needs a storage."""

    born: int
    dies: int
    bytes: Bytes


def _events(gm: GraphModule) -> Iterator[_Event]:
    for at, node in enumerate(gm.graph.nodes):
        if node.op == "call_module":
            inner = gm.get_submodule(str(node.target))
            assert isinstance(inner, GraphModule), f"{node.target} is not a segment"
            # The nodes inside a segment have the same `val`s as the nodes that they were copied from.
            for event in _events(inner):
                if event.node.op not in ("placeholder", "output"):
                    yield replace(event, at=at)
        else:
            yield _Event(node, at, [_value(n) for n in node.all_input_nodes], _made(node))


def _value(node: Node) -> object:
    return node.meta.get("val")


def _made(node: Node) -> list[object]:
    """The values that exist once a node has started; a step's result exists before its wait."""
    val = _value(node)
    made = list(val) if isinstance(val, list | tuple) else [val]
    return [*made, *(_value(user) for user in node.users if user.target is ops.wait)]


def _lives(
    events: Sequence[_Event], elsewhere: Collection[int], device_type: str
) -> dict[int, _Life]:
    let_go = _let_go(events)
    stored = [e.node for e in events if e.node.target is ops.store_grads]
    on_host = {*elsewhere, *storages(map(_value, stored), device_type)}
    lives: dict[int, _Life] = {}
    for i, event in enumerate(events):
        until = let_go.get(event.node, i)
        for storage, size in storages(event.makes, device_type).items():
            life = lives.setdefault(storage, _Life(born=i, dies=until, bytes=size))
            life.dies = max(life.dies, until)
        for storage in storages(event.uses, device_type):
            if storage in lives:
                lives[storage].dies = max(lives[storage].dies, until)
        if scratch := _scratch_bytes(event.node):  # no storage has a negative number
            lives[-1 - i] = _Life(born=i, dies=until, bytes=scratch)
    return {storage: life for storage, life in lives.items() if storage not in on_host}


def _let_go(events: Sequence[_Event]) -> dict[Node, int]:
    """The event at which each started step lets go of its inputs and its result.

    This is as in the runtime (`plan.lane_clocks`, [Note: let go in stream order]): the first wait for the
    step, for a later step of its lane, or for a step that read its result.
    """
    order: LaneClocks[Node] = LaneClocks()
    clocks: dict[Node, Clock] = {}
    found: dict[Node, int] = {}
    for i, event in enumerate(events):
        node = event.node
        if node.target is ops.wait:
            found |= dict.fromkeys(order.let_go(clocks.get(node.all_input_nodes[0], {})), i)
        elif (kind := ops.kind_of(node)) is not None and kind.lane is not Lane.COMPUTE:
            after = [clocks[read] for read in node.all_input_nodes if read in clocks]
            clocks[node] = order.add(kind.lane, after, node)
    return found | dict.fromkeys(order.held(), len(events) - 1)


def _scratch_bytes(node: Node) -> int:
    meta = node.meta.get(META)
    return meta.scratch_bytes if isinstance(meta, StepMeta) else 0


def _bytes(value: Tensor) -> Bytes:
    size = value.untyped_storage().nbytes()
    if isinstance(size, torch.SymInt):
        expression: sympy.Expr = size.node.expr
        return int(expression) if expression.is_number else expression
    return int(size)


def _step(node: Node) -> str:
    kind = ops.EXPLICIT.get(node.target) if callable(node.target) else None
    return str(node.target) if kind is None else kind.value


def _bucket(node: Node) -> int | None:
    bucket = node.kwargs.get("bucket") if node.target in ops.EXPLICIT else None
    return bucket if isinstance(bucket, int) else None
