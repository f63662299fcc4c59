"""Graphs made by hand with fake values, and the contexts that passes need; the only place to build one.

The toy model has parameters w_i of any shapes and takes one number x per rank:

    forward    y  = x * sum_i sum(w_i * w_i)                    saves x and the shards
    backward   dx = t * sum_i sum(w_i * w_i)    dw_i = 2 * t * x * w_i, reduced unless frozen

The model is exact in float64 for small whole numbers.  It reads each w_i through a view, as a Linear does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from fcdp_compile.cluster.free_memory import HostBudget, Limit
from fcdp_compile.core.params.layout import ParamLayout
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.bucket import bucket
from fcdp_compile.passes.choose_sources import choose_sources
from fcdp_compile.passes.graph.context import PassContext, Use, Uses, buckets_of, keys_of
from fcdp_compile.passes.lower import lower
from fcdp_compile.passes.schedule import schedule
from fcdp_compile.passes.segment import segment
from fcdp_compile.passes.stamp import stamp
from fcdp_compile.plan import Bucket, Direction, Placement, Variant
from fcdp_compile.strategy import PRESETS, Algorithm, Strategy

aten = torch.ops.aten

Shape = tuple[int, ...]
Known = dict[str, tuple[Use, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """One rank of N nodes of g ranks each."""

    nodes: int = 2
    ranks_per_node: int = 2
    node: int = 0
    place: int = 0


def key_of(name: str) -> str:
    return f"m0:{name}"


def make_spec(
    name: str,
    shape: Shape,
    where: Where,
    *,
    home: torch.dtype = torch.float32,
    gathers: torch.dtype | None = None,
    reduces: torch.dtype | None = None,
) -> ParamSpec:
    """A spec whose strategy does not matter: `make_context` sets the strategy."""
    layout = ParamLayout.of(shape, where.nodes, where.ranks_per_node)
    return ParamSpec(
        key=key_of(name),
        name=name,
        layout=layout,
        home_dtype=home,
        gather_dtype=gathers or home,
        reduce_dtype=reduces or gathers or home,
        local_shape=layout.local_shape(where.node, where.place),
        strategy=PRESETS["zero3"],
    )


def make_specs(
    shapes: Mapping[str, Shape], where: Where, **dtypes: torch.dtype
) -> dict[str, ParamSpec]:
    """Specs by key, in order."""
    return {key_of(n): make_spec(n, s, where, **dtypes) for n, s in shapes.items()}


def make_context(
    specs: Mapping[str, ParamSpec],
    where: Where,
    *,
    strategy: str | Strategy = "fcdp",
    frozen: Iterable[str] = (),
    known: Known | None = None,
    next_bucket: int = 0,
    bucket_bytes: int | None = 1 << 20,
    direction: Direction = Direction.FORWARD,
    variant: Variant = Variant.COLD,
    backward_buckets: tuple[int, ...] = (),
    host_bytes: int | None = None,
) -> PassContext:
    """A context; `frozen` holds names.  With one node nothing is cached, as in the runtime."""
    chosen = Strategy.parse(strategy)
    if where.ranks_per_node == 1:  # as `fit_strategy` does
        chosen = replace(chosen, algorithm=Algorithm.HIERARCHICAL)
    chosen = chosen if where.nodes > 1 else chosen.on_one_node(where.ranks_per_node)
    return PassContext(
        nodes=where.nodes,
        ranks_per_node=where.ranks_per_node,
        node=where.node,
        specs={key: replace(spec, strategy=chosen) for key, spec in specs.items()},
        frozen=frozenset(key_of(n) for n in frozen),
        known=known or {},
        next_bucket=next_bucket,
        bucket_bytes=bucket_bytes,
        host_budget=None
        if host_bytes is None
        else HostBudget(bytes=host_bytes, limit=Limit.OPTION),
        direction=direction,
        variant=variant,
        backward_buckets=backward_buckets,
    )


class GraphBuilder:
    """Builds a graph node by node; each node gets the `val` that tracing would give it."""

    def __init__(self, specs: Mapping[str, ParamSpec]) -> None:
        self._specs = specs
        self._mode = FakeTensorMode()
        self.graph = Graph()

    def input(self, name: str, shape: Shape = (), dtype: torch.dtype = torch.float32) -> Node:
        return self._with_val(self.graph.placeholder(name), self._empty(shape, dtype))

    def shard(self, name: str) -> Node:
        """The graph input that holds the home shard of a parameter."""
        spec = self._specs[key_of(name)]
        return self.input(f"shard_{name.replace('.', '_')}", spec.local_shape, spec.home_dtype)

    def unshard(self, shard: Node, name: str, *, viewed: bool = False) -> Node:
        """viewed: add the view of equal shape that `DTensor.to_local` leaves."""
        spec = self._specs[key_of(name)]
        if viewed:
            shard = self.call(aten.view.default, shard, list(spec.local_shape))
        node = self.graph.call_function(UNSHARD, (shard, spec.key))
        return self._with_val(node, self._empty(spec.layout.shape, spec.gather_dtype))

    def reduce_grad(self, grad: Node, name: str) -> Node:
        spec = self._specs[key_of(name)]
        node = self.graph.call_function(REDUCE_GRAD, (grad, spec.key))
        return self._with_val(node, self._empty(spec.local_shape, spec.home_dtype))

    def call(self, op: Callable[..., Any], *args: Any) -> Node:
        """Call an op on nodes and constants."""
        node = self.graph.call_function(op, args)
        with self._mode:
            return self._with_val(node, op(*map_arg(args, lambda n: n.meta["val"])))

    def finish(self, *outputs: Node | None) -> GraphModule:
        self.graph.output(tuple(outputs))
        self.graph.lint()
        return GraphModule(torch.nn.Module(), self.graph)

    def _empty(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        with self._mode:
            return torch.empty(shape, dtype=dtype)

    def _with_val(self, node: Node, val: Any) -> Node:
        node.meta["val"] = val
        return node


def toy_forward(
    specs: Mapping[str, ParamSpec],
    *,
    viewed: bool = False,
    uses: Sequence[str] | None = None,
    returned: Sequence[str] = (),
) -> GraphModule:
    """The toy model's forward: outputs y, then returned parameters, then saved x and shards.

    uses: names in order, all by default.
    """
    names = list(uses or [s.name for s in specs.values()])
    b = GraphBuilder(specs)
    shards = {n: b.shard(n) for n in dict.fromkeys(names)}
    x = b.input("x", dtype=_dtype(specs))
    y, full = x, {}
    for name in names:
        full[name] = b.unshard(shards[name], name, viewed=viewed)
        w = b.call(aten.view.default, full[name], [-1])
        squares = b.call(aten.sum.default, b.call(aten.mul.Tensor, w, w))
        y = b.call(aten.add.Tensor, y, b.call(aten.mul.Tensor, squares, x))
    y = b.call(aten.sub.Tensor, y, x)
    return b.finish(y, *(full[n] for n in returned), x, *shards.values())


def toy_backward(
    specs: Mapping[str, ParamSpec],
    *,
    frozen: Iterable[str] = (),
    viewed: bool = False,
    uses: Sequence[str] | None = None,
) -> GraphModule:
    """The toy model's backward: inputs x, shards, tangent; outputs dx, then dw (None where frozen).

    uses: names in order, from the last to the first by default; a gradient is complete after its last use.
    """
    b = GraphBuilder(specs)
    x = b.input("x", dtype=_dtype(specs))
    names = [s.name for s in specs.values()]
    shards = {n: b.shard(n) for n in names}
    tangent = b.input("tangent", dtype=_dtype(specs))
    dx = b.call(aten.sub.Tensor, tangent, tangent)
    twice = b.call(aten.mul.Tensor, b.call(aten.mul.Tensor, tangent, x), 2.0)
    grads: dict[str, Node | None] = dict.fromkeys(names)
    order = list(uses or reversed(names))
    last = {name: i for i, name in enumerate(order)}
    for i, name in enumerate(order):
        w = b.unshard(shards[name], name, viewed=viewed)
        flat = b.call(aten.view.default, w, [-1])
        squares = b.call(aten.sum.default, b.call(aten.mul.Tensor, flat, flat))
        dx = b.call(aten.add.Tensor, dx, b.call(aten.mul.Tensor, squares, tangent))
        if name not in frozen and i == last[name]:
            grads[name] = b.reduce_grad(b.call(aten.mul.Tensor, w, twice), name)
    return b.finish(dx, *grads.values())


def _dtype(specs: Mapping[str, ParamSpec]) -> torch.dtype:
    return next(iter(specs.values())).gather_dtype


@dataclass(slots=True, kw_only=True)
class Lowered:
    """Every variant of a forward and its backward, as the backend would make them.

    known: by key, as the runtime would have them afterwards.  contexts: the context that lowered each graph.
    """

    graphs: dict[tuple[Direction, Variant], GraphModule] = field(default_factory=dict)
    contexts: dict[tuple[Direction, Variant], PassContext] = field(default_factory=dict)
    known: Known = field(default_factory=dict)
    buckets: dict[int, Bucket] = field(default_factory=dict)
    placements: dict[int, Placement] = field(default_factory=dict)

    @property
    def backward(self) -> GraphModule:
        return self.graphs[Direction.BACKWARD, Variant.COLD]

    def forward(self, variant: Variant = Variant.COLD) -> GraphModule:
        return self.graphs[Direction.FORWARD, variant]


def lower_toy(
    shapes: Mapping[str, Shape],
    where: Where,
    *,
    strategy: str | Strategy = "fcdp",
    frozen: Sequence[str] = (),
    bucket_bytes: int = 1 << 20,
    viewed: bool = False,
    segmented: bool = False,
    scheduled: bool = False,
    stamped: bool = True,
    in_flight_bytes: int | None = None,
    host_bytes: int | None = None,
    **dtypes: torch.dtype,
) -> Lowered:
    """Runs the toy model through all passes after `partition`."""
    specs = make_specs(shapes, where, **dtypes)
    fw = toy_forward(specs, viewed=viewed)
    bw = toy_backward(specs, frozen=frozen, viewed=viewed)
    ctx = make_context(
        specs,
        where,
        strategy=strategy,
        frozen=frozen,
        bucket_bytes=bucket_bytes,
        host_bytes=host_bytes,
    )
    ctx = replace(ctx, in_flight_bytes=in_flight_bytes)
    return lower_pair(
        fw, bw, ctx, num_fwd_outputs=1, segmented=segmented, scheduled=scheduled, stamped=stamped
    )


def lower_pair(
    fw: GraphModule,
    bw: GraphModule,
    ctx: PassContext,
    *,
    num_fwd_outputs: int,
    segmented: bool = False,
    scheduled: bool = False,
    stamped: bool = True,
) -> Lowered:
    """Runs a forward and its backward through all passes after `partition`."""
    result = Lowered()
    forward = bucketed(fw, ctx)
    ctx = _adopted(result, forward.uses, ctx)
    backward = bucketed(bw, replace(ctx, direction=Direction.BACKWARD))
    ctx = _adopted(result, backward.uses, ctx)
    again = tuple(b.id for b in buckets_of(backward.uses))
    if stamped:
        stamp(fw, bw, again, num_fwd_outputs=num_fwd_outputs)
    todo = [(Direction.FORWARD, Variant.COLD, fw), (Direction.BACKWARD, Variant.COLD, bw)]
    strategies = {spec.strategy for spec in ctx.specs.values()}
    if any(s.is_resident for s in strategies):
        todo.append((Direction.FORWARD, Variant.WARM, fw))
    if any(s.accumulates_on is not None for s in strategies) and ctx.ranks > 1:
        todo += [(Direction.BACKWARD, v, bw) for v in (Variant.ACCUMULATE, Variant.COLLECT)]
    for direction, variant, gm in todo:
        uses = (backward if direction is Direction.BACKWARD else forward).uses
        reduced = {key: ctx.known[key][0] for key in keys_of(gm, REDUCE_GRAD)}
        now = replace(ctx, direction=direction, variant=variant, backward_buckets=again)
        now = sourced(replace(now, uses=uses, reduced=reduced))
        lowered = lower(clone(gm), now)
        if scheduled:
            lowered = schedule(lowered, now)
        result.graphs[direction, variant] = segment(lowered) if segmented else lowered
        result.contexts[direction, variant] = now
    return result


def bucketed(gm: GraphModule, ctx: PassContext) -> PassContext:
    """The context with the buckets of a graph; gradients are reduced in them, too."""
    uses = bucket(keys_of(gm, UNSHARD), ctx)
    return replace(ctx, uses=uses, reduced=uses)


def sourced(ctx: PassContext) -> PassContext:
    """The context with the sources of its buckets."""
    return replace(ctx, uses=choose_sources(ctx.uses, ctx))


def known_after(uses: Uses, known: Known | None = None) -> Known:
    """The known buckets of each key after a graph, as a book would have them."""
    found = dict(known or {})
    for use in dict.fromkeys(uses.values()):
        for p in use.bucket.params:
            mine = found.get(key_of(p.name), ())
            found[key_of(p.name)] = mine if use in mine else (*mine, use)
    return found


def placements_of(uses: Uses) -> dict[int, Placement]:
    """The placements of buckets, by number."""
    return {use.bucket.id: use.placement for use in uses.values()}


def _adopted(result: Lowered, uses: Uses, ctx: PassContext) -> PassContext:
    """The context for the next graph; a backward that makes gathers anew has buckets of its own."""
    result.placements |= placements_of(uses)
    result.buckets |= {b.id: b for b in buckets_of(uses)}
    result.known = known_after(uses, result.known)
    next_bucket = max(result.buckets, default=ctx.next_bucket - 1) + 1
    return replace(ctx, known=dict(result.known), next_bucket=next_bucket)


def clone(gm: GraphModule) -> GraphModule:
    graph = Graph()
    env: dict[Node, Node] = {}
    graph.output(graph.graph_copy(gm.graph, env))
    return GraphModule(gm, graph)


def calls(gm: GraphModule, target: Callable[..., Any]) -> list[Node]:
    """The nodes that call `target`, in order."""
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target is target]
