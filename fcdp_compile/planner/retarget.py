"""Give traced graphs a strategy and a mesh: sizes of home shards, buckets, and what is known of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import sympy
from torch.fx import GraphModule

from fcdp_compile.ops import REDUCE_GRAD, UNSHARD
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.params.spec import Home, param_spec
from fcdp_compile.passes.bucket import bucket, buckets_of, placements_of
from fcdp_compile.passes.graph.context import PassContext, use_of
from fcdp_compile.passes.pipeline import Graphs, known_to_backward
from fcdp_compile.passes.stamp import stamp
from fcdp_compile.passes.variants import clone
from fcdp_compile.plan import Bucket, Direction, Placement
from fcdp_compile.planner.traced import TracedGraph, TracedModel
from fcdp_compile.strategy import Cache, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Retargeted:
    """One traced graph on a mesh, with buckets: what `lower_all` asks for."""

    graphs: Graphs
    contexts: Mapping[Direction, PassContext]


def specs_of(traced: TracedModel, strategy: Strategy, mesh: Home) -> dict[str, ParamSpec]:
    """What becomes of every parameter, by key.

    strategy: as it is on the mesh.
    """
    return {
        p.key: param_spec(
            p.key,
            p.name,
            shape=p.shape,
            dtype=p.dtype,
            strategy=strategy,
            mesh=mesh,
            param_dtype=p.gather_dtype,
        )
        for p in traced.params
    }


@dataclass(slots=True)
class KnownBuckets:
    """The buckets of a model, as its graphs are planned one after the other."""

    base: PassContext
    _by_key: dict[str, list[Bucket]] = field(default_factory=dict)
    _placements: dict[int, Placement] = field(default_factory=dict)
    _left_out: dict[int, None] = field(default_factory=dict)  # by the host, for want of room

    def retarget(self, graph: TracedGraph, sizes: Mapping[sympy.Symbol, int]) -> Retargeted:
        """The next graph of the model; sizes: what its symbols are."""
        fw, bw = (self._resized(gm) for gm in (graph.forward, graph.backward))
        bucket(fw, self._context(Direction.FORWARD, {}))
        self._adopt(fw)
        made = [b for b in buckets_of(fw) if b.strategy.keeps_on_host]
        without = [b for b in made if not self._placements[b.id].is_cached]
        self._left_out |= dict.fromkeys(b.id for b in without)
        mine = _bucket_by_key(fw)
        bucket(bw, self._context(Direction.BACKWARD, mine))
        self._adopt(bw)
        if self.base.ranks > 1:
            stamp(fw, bw, num_fwd_outputs=graph.outputs)
        graphs = {Direction.FORWARD: fw, Direction.BACKWARD: bw}
        contexts = {d: replace(self._context(d, mine), sizes=sizes) for d in graphs}
        return Retargeted(graphs=graphs, contexts=contexts)

    def _resized(self, gm: GraphModule) -> GraphModule:
        """A copy whose home shards, and gradients of them, are this mesh's."""
        resized = clone(gm)
        for node in resized.graph.find_nodes(op="call_function", target=UNSHARD):
            shape = self.base.specs[str(node.args[1])].local_shape
            home = node.args[0]
            if tuple(home.meta["val"].shape) != shape:
                home.meta["val"] = home.meta["val"].new_empty(shape)
        for node in resized.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
            spec = self.base.specs[str(node.args[1])]
            node.meta["val"] = node.meta["val"].new_empty(spec.local_shape)
        return resized

    def _adopt(self, gm: GraphModule) -> None:
        keys = {spec.name: key for key, spec in self.base.specs.items()}
        self._placements |= placements_of(gm)
        for made in buckets_of(gm):
            for param in made.params:
                known = self._by_key.setdefault(keys[param.name], [])
                if made not in known:
                    known.append(made)

    def _context(self, direction: Direction, mine: Mapping[str, Bucket]) -> PassContext:
        """mine: the forward's bucket of each parameter, for its backward."""
        found = {key: tuple(buckets) for key, buckets in self._by_key.items()}
        if direction is Direction.BACKWARD:
            known = {
                key: known_to_backward(mine.get(key), b, self._placements)
                for key, b in found.items()
            }
        else:  # what a backward gathers for itself is cached by nobody
            known = {
                key: tuple(
                    b
                    for b in buckets
                    if b.strategy.cache is Cache.NONE
                    or self._placements[b.id].is_cached
                    or b.id in self._left_out
                )
                for key, buckets in found.items()
            }
        numbers = [b.id for buckets in found.values() for b in buckets]
        return replace(
            self.base,
            direction=direction,
            known=known,
            placements=dict(self._placements),
            next_bucket=max(numbers, default=-1) + 1,
        )


def _bucket_by_key(gm: GraphModule) -> dict[str, Bucket]:
    nodes = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    return {str(n.args[1]): use_of(n).bucket for n in nodes}
