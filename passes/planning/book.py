"""The buckets of one model: where they wait, and how much host memory they take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from fcdp_compile.cluster.free_memory import UNLIMITED
from fcdp_compile.ops import UNSHARD
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.passes.bucket import buckets_of, host_bytes_taken, placements_of, reduced_params
from fcdp_compile.passes.graph.context import PassContext, use_of
from fcdp_compile.passes.memory.place_gradients import fit_gradients
from fcdp_compile.plan import Bucket, Direction, Placement, Tier
from fcdp_compile.strategy import Cache

ByKey = Mapping[str, Bucket]
"""The bucket of each parameter that a graph reads, by key."""


class BucketBook:
    """The decisions made so far for the graphs of one model; they are the same on every rank.

    specs: of the model's parameters, by key.  living: keys of the parameters that the model still has.
    """

    def __init__(self, specs: Mapping[str, ParamSpec]) -> None:
        self.specs = specs
        self.living: Collection[str] = specs.keys()
        self._keys = {spec.name: key for key, spec in specs.items()}
        self._buckets: dict[int, Bucket] = {}
        self._by_key: dict[str, list[Bucket]] = {}
        # As `bucket` made them; `choose_tiers` later decides for each graph and rank alone.
        self._placements: dict[int, Placement] = {}
        self._without_room: dict[int, None] = {}  # forwards' buckets that the host has no room for
        self._cached_bytes = 0
        # By the parameters that one graph reduces together; None if the host has no room.
        self._gradient_bytes: dict[tuple[str, ...], int | None] = {}
        self._device_bytes: dict[int, int] = {}  # as last planned

    # --- what passes read ---------------------------------------------------------------------------------

    def context(self, base: PassContext, direction: Direction, forward: ByKey) -> PassContext:
        """A context that knows the buckets.

        forward: the buckets of the forward, for its backward.
        """
        return replace(
            base,
            direction=direction,
            known={key: tuple(found) for key, found in self._known(direction, forward)},
            placements=dict(self._placements),
            next_bucket=max(self._buckets, default=-1) + 1,
        )

    def _known(
        self, direction: Direction, forward: ByKey
    ) -> Iterable[tuple[str, Iterable[Bucket]]]:
        """All buckets of each parameter, oldest first; none with a parameter that the model no longer has.

        All, so that a graph reuses the same buckets whichever graph was compiled before it.
        """
        for key, buckets in self._by_key.items():
            whole = [b for b in buckets if all(self._keys[p.name] in self.living for p in b.params)]
            if direction is Direction.BACKWARD:
                yield key, self._known_to_backward(forward.get(key), whole)
            else:
                yield key, [b for b in whole if self._may_be_cached(b)]

    def _known_to_backward(self, mine: Bucket | None, found: list[Bucket]) -> list[Bucket]:
        """The forward's bucket first: a backward loads it if the forward stored it, or else gathers."""
        if mine is None:
            return found
        if self._placements[mine.id].is_cached:
            return [mine]
        return [mine, *(b for b in found if not self._placements[b.id].is_cached)]

    def _may_be_cached(self, bucket: Bucket) -> bool:
        """Whether a forward may use the bucket: no graph caches a bucket that a backward made for itself."""
        is_cached = self._placements[bucket.id].is_cached
        return bucket.strategy.cache is Cache.NONE or is_cached or self.is_without_room(bucket)

    # --- what graphs add ----------------------------------------------------------------------------------

    def adopt(
        self, gm: GraphModule, base: PassContext, direction: Direction, forward: ByKey
    ) -> None:
        """Note the buckets of a graph; requires `bucket`."""
        made = buckets_of(gm)
        self._placements |= placements_of(gm)
        for bucket in made:
            self._buckets[bucket.id] = bucket
            for param in bucket.params:
                known = self._by_key.setdefault(self._keys[param.name], [])
                if bucket not in known:
                    known.append(bucket)
        self._cached_bytes = host_bytes_taken(self.context(base, direction, forward))
        if direction is not Direction.BACKWARD:
            kept = [b.id for b in made if b.strategy.keeps_on_host]
            self._without_room |= {i: None for i in kept if not self._placements[i].is_cached}

    def repeat(
        self,
        buckets: Sequence[Bucket],
        keys: Mapping[str, str],
        frozen: Collection[str],
        *,
        host_bytes: int | None,
    ) -> dict[int, Bucket] | None:
        """Note buckets like these with other parameters, by the number of each; None if they would differ.

        buckets: of a graph, in order of their numbers.  keys: the new parameters by the old.  frozen: those
        of the new parameters that need no gradient.  host_bytes: of host memory that node shards may take.
        """
        if any(key in self._by_key for key in keys.values()):
            return None
        params = {self.specs[old].name: self.specs[new].name for old, new in keys.items()}
        made: dict[int, Bucket] = {}
        taken_bytes = self._cached_bytes
        for number, bucket in enumerate(buckets, max(self._buckets, default=-1) + 1):
            if not all(p.name in params for p in bucket.params) or self.is_without_room(bucket):
                return None
            of = [self._keys[params[p.name]] for p in bucket.params]
            if any((key in frozen) != bucket.frozen for key in of):
                return None
            if self._placements[bucket.id].tier is Tier.HOST:
                taken_bytes += bucket.host_bytes
            renamed = tuple(replace(p, name=params[p.name]) for p in bucket.params)
            made[bucket.id] = replace(bucket, id=number, params=renamed)
        if host_bytes is not None and taken_bytes > host_bytes:
            return None
        for old, bucket in made.items():
            self._buckets[bucket.id] = bucket
            self._placements[bucket.id] = replace(self._placements[old], bucket=bucket.id)
            for p in bucket.params:
                self._by_key.setdefault(self._keys[p.name], []).append(bucket)
        self._cached_bytes = taken_bytes
        return made

    def is_without_room(self, bucket: Bucket) -> bool:
        """Whether a forward found no room on the host for the bucket."""
        return bucket.id in self._without_room

    # --- memory -------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that each rank's node shards and waiting gradients are planned to take."""
        return self._cached_bytes + sum(size or 0 for size in self._gradient_bytes.values())

    def fit_gradients(self, backward: GraphModule, ctx: PassContext) -> PassContext:
        """A context whose gradients wait only if the host has room for them; takes that room.

        Earlier decisions on gradients stay: a rank that recompiles a graph must do the same as the others.
        """
        reduced = reduced_params(backward, ctx)
        new = [b for b, params in reduced.items() if params not in self._gradient_bytes]
        left_bytes = UNLIMITED
        if ctx.host_budget is not None:
            left_bytes = max(0, ctx.host_budget.bytes - self.host_bytes)
        waits = fit_gradients(new, ctx.placements, host_bytes=left_bytes)
        for bucket, waiting in zip(new, waits, strict=True):
            on_host = bucket.waiting_gradient_bytes if bucket.strategy.uses_host else 0
            self._gradient_bytes[reduced[bucket]] = on_host if waiting else None
        without = [b.id for b, params in reduced.items() if self._gradient_bytes[params] is None]
        reducing = {i: replace(ctx.placements[i], gradient_tier=Tier.NONE) for i in without}
        return replace(ctx, placements={**ctx.placements, **reducing})

    def device_bytes_of_others(self, buckets: Iterable[Bucket]) -> int:
        """Device bytes that graphs planned earlier keep for buckets other than `buckets`."""
        mine = {b.id for b in buckets}
        return sum(size for i, size in self._device_bytes.items() if i not in mine)

    def keep_on_device(self, kept_bytes: Mapping[int, int]) -> None:
        """Note the device bytes that a graph's plan keeps for each of its buckets."""
        self._device_bytes |= kept_bytes


def buckets_by_key(gm: GraphModule) -> dict[str, Bucket]:
    """The bucket of each parameter that a graph reads; requires `bucket`."""
    nodes = gm.graph.find_nodes(op="call_function", target=UNSHARD)
    return {str(n.args[1]): use_of(n).bucket for n in nodes}
