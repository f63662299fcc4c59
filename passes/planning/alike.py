"""Plan a trace again for alike parameters, by exchanging the parameters and buckets of a plan.

[Note: alike parameters] Parameters of one model are alike if all facts about them are equal but their names:
layout, dtypes, strategy.  Dynamo traces equal layers once, so a trace has the keys of the parameters that it
was made with, and serves alike ones.  Which ones a call is for, its inputs tell (`runtime.alike`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import GraphModule

from fcdp_compile import ops
from fcdp_compile.ops import GIVEN, REDUCE_GRAD, UNSHARD
from fcdp_compile.passes.graph.context import PassContext, Use, Uses
from fcdp_compile.passes.graph.inline import clone
from fcdp_compile.passes.pipeline import Lowered
from fcdp_compile.passes.planning.book import BucketBook
from fcdp_compile.passes.planning.placement import Room, place_all
from fcdp_compile.passes.planning.plan_graphs import Planned
from fcdp_compile.plan import Bucket, Schedule


def renamed(gm: GraphModule, keys: Mapping[str, str]) -> GraphModule:
    """A copy of a traced graph with other keys, which are given by the graph's own."""
    copied = clone(gm)
    for target in (UNSHARD, REDUCE_GRAD, *GIVEN.values()):
        for node in copied.graph.find_nodes(op="call_function", target=target):
            shard, key, *dtype = node.args
            node.args = (shard, keys.get(str(key), key), *dtype)
    copied.recompile()
    return copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterparts:
    """The parameters and buckets that take the places of others.

    keys, names: of the new parameters, by those of the old.  buckets: the new buckets by the old number.
    """

    keys: Mapping[str, str]
    names: Mapping[str, str]
    buckets: Mapping[int, Bucket]

    def graph(self, gm: GraphModule) -> GraphModule:
        """A copy of a graph, lowered or not, with the new parameters and buckets."""
        new_graph = renamed(gm, self.keys)
        for node in new_graph.graph.nodes:
            if node.target not in ops.EXPLICIT:
                continue
            if isinstance(bucket_id := node.kwargs.get("bucket"), int):
                node.update_kwarg("bucket", self.buckets[bucket_id].id)
            if params := node.kwargs.get("params"):
                node.update_kwarg("params", tuple(self.names[name] for name in params))
            if node.target in (ops.stamp, ops.check):
                *before, ids = node.args
                node.args = (*before, self.numbers(ids))
        new_graph.recompile()
        return new_graph

    def numbers(self, ids: Any) -> tuple[int, ...]:
        """The numbers of the new buckets."""
        return tuple(self.buckets[i].id for i in ids)

    def use(self, old: Use) -> Use:
        """The new bucket with its placement."""
        new = self.buckets[old.bucket.id]
        return replace(old, bucket=new, placement=replace(old.placement, bucket=new.id))

    def uses(self, old: Uses) -> Uses:
        """The buckets of the new parameters."""
        return {self.keys[key]: self.use(use) for key, use in old.items()}

    def schedule(self, old: Schedule) -> Schedule:
        """A schedule with the new buckets."""
        steps = (
            s if s.bucket is None else replace(s, bucket=self.buckets[s.bucket].id)
            for s in old.steps
        )
        return replace(old, steps=tuple(steps))

    def lowered(self, old: Lowered) -> Lowered:
        """The lowered graphs of the new parameters and their schedules."""
        return Lowered(
            placed=tuple(map(self.use, old.placed)),
            refresh=self.numbers(old.refresh),
            graphs={key: self.graph(gm) for key, gm in old.graphs.items()},
            schedules=tuple(map(self.schedule, old.schedules)),
        )

    def context(self, old: PassContext) -> PassContext:
        """The context of the new graph; it lowers the graph, and makes no more buckets."""
        dtypes = {new: old.specs[key].gather_dtype for key, new in self.keys.items()}
        specs = {key: replace(old.specs[key], gather_dtype=d) for key, d in dtypes.items()}
        return replace(
            old,
            known={},
            specs={**old.specs, **specs},
            uses=self.uses(old.uses),
            reduced=self.uses(old.reduced),
            backward_buckets=self.numbers(old.backward_buckets),
        )


def plan_alike(
    like: Planned,
    keys: Mapping[str, str],
    book: BucketBook,
    room: Room,
    frozen: Collection[str],
    *,
    number: int,
    host_bytes: int | None,
) -> tuple[Planned, Counterparts] | None:
    """Plan the graphs of `like` for alike parameters ([Note: alike parameters]) as the passes would.

    None if the passes would decide otherwise, or may: a parameter has a bucket already or another home node,
    was frozen or unfrozen, or the host has no room for all buckets.

    keys: the new parameters by the old.  book: gets the new buckets.  frozen: those of the new parameters
    that need no gradient.  number: the plan's.  host_bytes: of host memory that node shards may take.
    """
    new = book.repeat(like.plan.buckets, keys, frozen, host_bytes=host_bytes)
    if new is None:
        return None
    names = {book.specs[old].name: book.specs[key].name for old, key in keys.items()}
    others = Counterparts(keys=keys, names=names, buckets=new)
    lowered = others.lowered(like.lowered)
    entries = tuple(replace(e, bucket=new[e.bucket].id) for e in like.step_memory.entries)
    memory = replace(like.step_memory, entries=entries)
    plan = place_all(
        memory,
        lowered,
        book,
        replace(room, taken_bytes=room.taken_bytes + like.beside_bytes),
        nodes=like.plan.nodes,
        ranks_per_node=like.plan.ranks_per_node,
        number=number,
    )
    planned = replace(
        like,
        plan=plan,
        lowered=lowered,
        step_memory=memory,
        backward=like.backward and others.context(like.backward),
        without_room=(),
        wanting=tuple(new[b.id] for b in like.wanting),
    )
    return planned, others
