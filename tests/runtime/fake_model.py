"""The part of a sharded model that programs use, and programs of hand-built graphs to run on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from builders_graph import Lowered
from fcdp_compile.core.params.layout import choose_dim
from fcdp_compile.devices import Cpu
from fcdp_compile.plan import Bucket, Direction, Kind, Placement, Tier, Variant
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.bucket_cache import BucketCache
from fcdp_compile.runtime.cache.home_transfers import HomeTransfers
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.collectives import Telling
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes, tensor_of
from fcdp_compile.runtime.lanes.marks import Exposure
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.runtime.program import Program
from fcdp_compile.strategy import Cache, Strategy
from fcdp_compile.torch_compat.graphs import boxed
from tests.passes.lockstep import cut


class Collectives:
    """2 x 2 ranks on real lanes; all other ranks hold and send the same as this rank."""

    def __init__(self, counters: Counters, lanes: Lanes) -> None:
        self._counters = counters
        self._lanes = lanes
        self.names: list[str] = []
        self.fails: set[Kind] = set()
        self.is_instant = False
        self.node = 0

    def all_gather(
        self, kind: Kind, send: Tensor | Pending, name: str, codec: None = None, sizes: None = None
    ) -> Pending:
        own = tensor_of(send)
        self._counters.add(kind, own.nbytes)
        out = own.new_full((2 * own.numel(),), float("nan"))
        return self._start(kind, lambda: out.view(2, -1).copy_(own), out, send, name)

    def reduction(
        self,
        kind: Kind,
        send: Tensor | Pending,
        name: str,
        *,
        dtype: torch.dtype,
        codec: None,
        sizes: None,
    ) -> Pending:
        whole = tensor_of(send)
        half = whole.numel() // 2
        self._counters.add(kind, whole.nbytes // 2)
        out = whole.new_full((half,), float("nan"), dtype=dtype)
        return self._start(kind, lambda: out.copy_(whole[:half]), out, send, name)

    def tell(self, words: list[int], what: str) -> Telling:
        return Telling(words, None, str)

    def _start(
        self, kind: Kind, run: Callable[[], Any], out: Tensor, send: Tensor | Pending, name: str
    ) -> Pending:
        def task() -> None:
            if kind in self.fails:
                raise RuntimeError(f"{name} failed")
            run()

        self.names.append(name)
        pending = self._lanes.start(kind.lane, task, out=out, reads=[send], name=name)
        if self.is_instant:
            assert pending.done is not None
            pending.done.order()
        return pending


class FakeModel(SimpleNamespace):
    """The part of a ShardedModel that programs use; all buckets wait as the strategy wants, or in one tier.

    shards: the home shard of each parameter, by name, for gathers without a graph.
    """

    def __init__(self, strategy: str, tier: Tier | None, shards: Mapping[str, Tensor]) -> None:
        device = Cpu()
        counters, lanes = Counters(), Lanes(device, is_blocking=True)
        caches = {Cache.NONE: Tier.NONE, Cache.GPU: Tier.GPU}
        self._tier = tier or caches.get(Strategy.parse(strategy).cache, Tier.HOST)
        self._shards = shards
        self._caches: dict[int, BucketCache] = {}
        self.current = 0  # the generation
        super().__init__(
            collectives=Collectives(counters, lanes),
            counters=counters,
            lanes=lanes,
            exposure=Exposure(device),
            home_transfers=HomeTransfers(counters, lanes, node=0),
            pool=PinnedPool(device),
            device_memory=None,
            topology=SimpleNamespace(home=lambda scope: None),
            seams=SimpleNamespace(take=lambda kind, bucket, generation: None, fail=lambda: None),
            references=SimpleNamespace(fail=lambda: None),
            validity=SimpleNamespace(notice=lambda buckets: None),
        )

    def bind(self, bucket: Bucket) -> BoundBucket:
        """The bucket; its cache is the same each time."""
        model: Any = self  # it is its own Transport
        cache = self._caches.setdefault(bucket.id, BucketCache(bucket, model))
        placement = Placement(bucket=bucket.id, tier=self._tier, gradient_tier=Tier.HOST, why="")
        generations: Any = SimpleNamespace(of=lambda keys: self.current)
        records: Any = [
            SimpleNamespace(
                spec=SimpleNamespace(key=p.name),
                local=partial(self._shards.get, p.name),
                lives=True,
            )
            for p in bucket.params
        ]
        return BoundBucket(bucket, placement, records, cache, generations, model)


def fake_model(
    strategy: str = "fcdp", tier: Tier | None = None, shards: Mapping[str, Tensor] | None = None
) -> Any:
    """The part of a ShardedModel that programs use."""
    return FakeModel(strategy, tier, shards or {})


class BoundProgram(Program):
    """A program that binds its buckets to the model that it runs on."""

    def __init__(self, made: Lowered, gm: GraphModule, segments: dict[str, Any]) -> None:
        super().__init__(gm, segments, number=0)
        self._made = made

    def run(self, model: Any, args: list[Any], **options: Any) -> tuple[Any, ...]:  # type: ignore[override]
        buckets = {i: model.bind(bucket) for i, bucket in self._made.buckets.items()}
        return super().run(model, buckets, args, **options)


def program(
    made: Lowered,
    direction: Direction,
    variant: Variant = Variant.COLD,
    wrap: Callable[[Any], Any] = lambda f: f,
) -> BoundProgram:
    gm: GraphModule = made.graphs[direction, variant]
    names = [str(n.target) for n in gm.graph.find_nodes(op="call_module")]
    segments = {n: wrap(boxed(gm.get_submodule(n))) for n in names}
    return BoundProgram(made, gm, segments)


def same_on_all_ranks() -> tuple[dict[str, Tensor], list[Tensor]]:
    """Parameters whose shards are equal on every rank, and these shards."""
    full = {"w": torch.full((8, 4), 3.0), "b": torch.full((4,), 2.0)}
    homes = [cut(w, choose_dim(w.shape, 2, 2), 2, 2)[0] for w in full.values()]
    return full, homes
