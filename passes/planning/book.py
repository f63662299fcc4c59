"""The buckets of one model: where they wait, and how much host memory they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from fcdp_compile.cluster.free_memory import UNLIMITED
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.passes.bucket import host_bytes_taken
from fcdp_compile.passes.graph.context import PassContext, Use, Uses
from fcdp_compile.passes.memory.place_gradients import fit_gradients
from fcdp_compile.plan import Bucket, Direction, Tier
from fcdp_compile.strategy import Cache


class BucketBook:
    """The decisions made so far for the graphs of one model; they are the same on every rank.

    specs: of the model's parameters, by key.  living: keys of the parameters that the model still has.
    """

    def __init__(self, specs: Mapping[str, ParamSpec]) -> None:
        self.specs = specs
        self.living: Collection[str] = specs.keys()
        self._keys = {spec.name: key for key, spec in specs.items()}
        self._facts = {key: spec.facts for key, spec in specs.items()}
        self._alike = Counter(self._facts.values())
        # As `bucket` made them; `choose_tiers` later decides for each graph and rank alone.
        self._placed: dict[int, Use] = {}
        self._by_key: dict[str, list[Use]] = {}
        self._without_room: dict[int, None] = {}  # forwards' buckets that the host has no room for
        self._cached_bytes = 0
        # By the parameters that one graph reduces together; None if the host has no room.
        self._gradient_bytes: dict[tuple[str, ...], int | None] = {}
        self._device_bytes: dict[int, int] = {}  # as last planned

    # --- what passes read ---------------------------------------------------------------------------------

    def context(self, base: PassContext, direction: Direction, forward: Uses) -> PassContext:
        """A context that knows the buckets.

        forward: the buckets of the forward, for its backward.
        """
        return replace(
            base,
            direction=direction,
            known={key: tuple(found) for key, found in self._known(direction, forward)},
            next_bucket=max(self._placed, default=-1) + 1,
        )

    def _known(self, direction: Direction, forward: Uses) -> Iterable[tuple[str, Iterable[Use]]]:
        """All buckets of each parameter, oldest first; none with a parameter that the model no longer has.

        All, so that a graph reuses the same buckets whichever graph was compiled before it.
        """
        for key, uses in self._by_key.items():
            whole = [u for u in uses if all(k in self.living for k in self._keys_of(u.bucket))]
            if direction is Direction.BACKWARD:
                yield key, self._known_to_backward(forward.get(key), whole)
            else:
                yield key, [use for use in whole if self._may_be_cached(use)]

    def _keys_of(self, bucket: Bucket) -> list[str]:
        return [self._keys[p.name] for p in bucket.params]

    def _known_to_backward(self, mine: Use | None, found: list[Use]) -> list[Use]:
        """The forward's bucket first: a backward loads it if the forward stored it, or else gathers."""
        if mine is None:
            return found
        if mine.placement.is_cached:
            return [mine]
        return [mine, *(use for use in found if not use.placement.is_cached)]

    def _may_be_cached(self, use: Use) -> bool:
        """Whether a forward may use the bucket; a bucket that only a backward made never gets a tier."""
        is_uncached = use.bucket.strategy.cache is Cache.NONE
        return is_uncached or use.placement.is_cached or self.is_without_room(use.bucket)

    # --- what graphs add ----------------------------------------------------------------------------------

    def adopt(self, uses: Uses, base: PassContext, direction: Direction, forward: Uses) -> None:
        """Note the buckets of a graph."""
        for use in uses.values():
            self._add(use)
        self._cached_bytes = host_bytes_taken(self.context(base, direction, forward))
        if direction is not Direction.BACKWARD:
            kept = [use for use in uses.values() if use.bucket.strategy.keeps_on_host]
            without = [use.bucket.id for use in kept if not use.placement.is_cached]
            self._without_room |= dict.fromkeys(without)

    def _add(self, use: Use) -> None:
        if use.bucket.id not in self._placed:
            self._placed[use.bucket.id] = use
            for key in self._keys_of(use.bucket):
                self._by_key.setdefault(key, []).append(use)

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
        if any(
            key in self._by_key or self._facts[key] != self._facts[old] for old, key in keys.items()
        ):
            return None
        params = {self.specs[old].name: self.specs[new].name for old, new in keys.items()}
        made: dict[int, Use] = {}
        taken_bytes = self._cached_bytes
        for number, bucket in enumerate(buckets, max(self._placed, default=-1) + 1):
            if not all(p.name in params for p in bucket.params) or self.is_without_room(bucket):
                return None
            renamed = tuple(replace(p, name=params[p.name]) for p in bucket.params)
            new = replace(bucket, id=number, params=renamed)
            if any((key in frozen) != bucket.frozen for key in self._keys_of(new)):
                return None
            placement = self._placed[bucket.id].placement
            if placement.tier is Tier.HOST:
                taken_bytes += bucket.host_bytes
            made[bucket.id] = Use(bucket=new, placement=replace(placement, bucket=number))
        if host_bytes is not None and taken_bytes > host_bytes:
            return None
        for use in made.values():
            self._add(use)
        self._cached_bytes = taken_bytes
        return {old: use.bucket for old, use in made.items()}

    def calls(self, keys: Collection[str]) -> int:
        """How many sets of alike parameters the model has for a graph that reads these (`planning.alike`)."""
        read = Counter(self._facts[key] for key in keys)
        return min((self._alike[facts] // count for facts, count in read.items()), default=1)

    def is_without_room(self, bucket: Bucket) -> bool:
        """Whether a forward found no room on the host for the bucket."""
        return bucket.id in self._without_room

    # --- memory -------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that each rank's node shards and waiting gradients are planned to take."""
        return self._cached_bytes + sum(size or 0 for size in self._gradient_bytes.values())

    def fit_gradients(self, ctx: PassContext) -> PassContext:
        """A context whose gradients wait only if the host has room for them; takes that room.

        Earlier decisions on gradients stay: a rank that recompiles a graph must do the same as the others.
        """
        names = {ctx.specs[key].name for key in ctx.reduced}
        params = {
            use: tuple(p.name for p in use.bucket.params if p.name in names)
            for use in ctx.reduced.values()
        }
        new = [use for use, reduced in params.items() if reduced not in self._gradient_bytes]
        left_bytes = UNLIMITED
        if ctx.host_budget is not None:
            left_bytes = max(0, ctx.host_budget.bytes - self.host_bytes)
        waits = fit_gradients(new, host_bytes=left_bytes)
        for use, waiting in zip(new, waits, strict=True):
            bucket = use.bucket
            on_host = bucket.waiting_gradient_bytes if bucket.strategy.accumulates_on_host else 0
            self._gradient_bytes[params[use]] = on_host if waiting else None
        fitting = {
            use: use
            if self._gradient_bytes[reduced] is not None
            else replace(use, placement=replace(use.placement, gradient_tier=Tier.NONE))
            for use, reduced in params.items()
        }
        return replace(ctx, reduced={key: fitting[use] for key, use in ctx.reduced.items()})

    def device_bytes_of_others(self, buckets: Iterable[Bucket]) -> int:
        """Device bytes that graphs planned earlier keep for buckets other than `buckets`."""
        mine = {b.id for b in buckets}
        return sum(size for i, size in self._device_bytes.items() if i not in mine)

    def keep_on_device(self, kept_bytes: Mapping[int, int]) -> None:
        """Note the device bytes that a graph's plan keeps for each of its buckets."""
        self._device_bytes |= kept_bytes
