"""Read parameters outside of compiled graphs: after graph breaks, without a compiler, in the training loop.

[Note: outside of graphs] If a graph keeps a copy of a bucket with the parameter, the bucket's copy serves.
Otherwise the parameter gets a bucket of its own, if its strategy keeps copies until values change.  Either
bucket is validated like before a graph, and gathered between nodes if its copy is outdated.  So the bytes
between nodes are those of a graph, but nothing hides the wait.  Host memory must have room; other parameters
are gathered at every use.  Within `no_sync` their gradients wait like a graph's, if there is room.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from fcdp_compile.buckets import exact_bucket, fitted
from fcdp_compile.params.home_shard import bring_back_inputs
from fcdp_compile.params.mesh import Topology
from fcdp_compile.params.packing import unpack_full
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.plan import Bucket, Kind, Placement, Tier
from fcdp_compile.plan.reduction import INTER_KINDS
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.cache.host_cache import NodeShardCache
from fcdp_compile.runtime.collectives.agreement import About
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.eager import Eager, gathers
from fcdp_compile.runtime.lanes.lanes import range_name
from fcdp_compile.runtime.optimizers.gradients import Accumulation
from fcdp_compile.runtime.parameters.buckets import GraphBuckets
from fcdp_compile.runtime.parameters.record import Records
from fcdp_compile.runtime.parameters.upkeep import CacheUpkeep
from fcdp_compile.runtime.parameters.validity import Validity
from fcdp_compile.strategy import Cache, GradientOn, Strategy
from fcdp_compile.strategy.formats import Format
from fcdp_compile.torch_compat import backward_number

log = logging.getLogger(__name__)

_TIERS = {Cache.GPU: Tier.GPU, Cache.GPU_FULL: Tier.GPU_FULL}
"""Where copies of strategies that keep them on the GPU wait; all others wait on the host."""

_BETWEEN_NODES = frozenset(kind.value for kind in INTER_KINDS)


class OutsideReads:
    """The reads of one model's parameters outside of graphs.

    buckets: those of graphs.  placements: where each bucket waits.
    """

    def __init__(
        self,
        topology: Topology,
        records: Records,
        validity: Validity,
        cache: NodeShardCache,
        upkeep: CacheUpkeep,
        collectives: Collectives,
        host_memory: HostMemory,
        counters: Counters,
        placements: dict[int, Placement],
        buckets: GraphBuckets,
        accumulation: Accumulation,
    ) -> None:
        self._ranks = topology.ranks
        self._records = records
        self._validity = validity
        self._cache = cache
        self._upkeep = upkeep
        self._collectives = collectives
        self._host_memory = host_memory
        self._placements = placements
        self._buckets = buckets
        self._eager = Eager(topology, collectives)
        self._accumulation = accumulation
        self._waiting: dict[str, Bucket] = {}  # of gradients
        self._own: dict[str, Bucket] = {}
        # Parameters that have had own buckets, and those of them of which a module has gone.
        self._watched: set[str] = set()
        self._gone: list[str] = []
        self._numbers = {key: -1 - 2 * i for i, key in enumerate(records)}
        self._cost = _Cost(counters, is_first=topology.node == topology.place == 0)

    def use(self, key: str, shard: Tensor) -> Tensor:
        """The whole parameter `key` in the gather dtype for a forward; every rank must call it.

        shard: this rank's home shard, perhaps released, or another value that a caller put in its place.

        Raises: PlanMismatchError on every rank if ranks are about to do different things; FcdpError if
        parameters have no values yet.
        """
        spec = self._records[key].spec
        with self._cost.counted(spec.name):
            bucket = self._bucket_for(key)
            if bucket is None:
                bring_back_inputs([shard])
                return self._eager.gather(spec, shard, spec.gather_dtype)
            may_keep = self._records[key].is_home(shard) and self._has_room(key, bucket)
            about = _about(spec, f"{gathers(spec)} for a forward", bucket)
            verdict = self._validity.check([bucket], about, is_given=not may_keep)
            if verdict.is_given:
                bring_back_inputs([shard])
                return self._eager.gather(spec, shard, spec.gather_dtype)
            self._keep(key, bucket)
            if verdict.stale[bucket.id]:
                self._upkeep.refresh(bucket)
            return self._loaded([key], bucket)[0]

    def read(self, key: str, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole parameter `key`, exactly, in new memory (`read_all`)."""
        return self.read_all([(key, shard, dtype)])[0]

    def read_all(self, wanted: Sequence[tuple[str, Tensor, torch.dtype]]) -> list[Tensor]:
        """The whole parameters, exactly, each in new memory; every rank must call it.

        If there is a valid copy, nothing is sent between nodes; a copy of several parameters is loaded once.
        A stale copy of parameters that are all wanted is made anew, so the next forward need not gather it.
        Else a parameter is gathered by itself, and no copy is kept.

        wanted: for each parameter its key, this rank's home shard, and the dtype of the result.

        Raises: as `use`.
        """
        copied: dict[int, tuple[Bucket, list[str]]] = {}
        for key, _, dtype in wanted:
            bucket = self._copied(key) if self._records[key].spec.gather_dtype is dtype else None
            if bucket is not None:
                copied.setdefault(bucket.id, (bucket, []))[1].append(key)
        found: dict[str, Tensor] = {}
        for bucket, keys in copied.values():
            spec = self._records[keys[0]].spec
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            about = _about(spec, f"reads a copy of parameter {spec.name!r}{more}", bucket)
            is_stale = self._validity.check([bucket], about).stale[bucket.id]
            if is_stale and len(keys) == len(bucket.params):
                self._upkeep.refresh(bucket)
                is_stale = False
            if not is_stale:
                found |= zip(keys, self._loaded(keys, bucket), strict=True)
        return [
            found[key] if key in found else self.gather(key, shard, dtype)
            for key, shard, dtype in wanted
        ]

    def gather(self, key: str, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather a parameter by itself in a dtype from this rank's `shard`, into new memory."""
        return self._eager.gather(self._records[key].spec, shard, dtype)

    def reduce(self, key: str, grad: Tensor) -> Tensor:
        """Average a full gradient over all ranks and return this rank's shard of it.

        Gradients of the parameter that wait (`accumulate`) are in it, and then wait no longer.
        """
        spec = self._records[key].spec
        with self._cost.counted(spec.name):
            if not self._accumulation.is_on and self._accumulation.concerns():
                self._accumulation.begin_graph(backward_number(), accumulates=False)
            bucket = self._waiting.get(key)
            if bucket is None or not self._accumulation.waits_for([bucket.id]):
                return self._eager.reduce(spec, grad)
            collect = partial(
                self._accumulation.collect, bucket, (spec.name,), dtype=spec.reduce_dtype
            )
            return self._eager.reduce(spec, grad, collect)

    # --- gradients that wait ------------------------------------------------------------------------------

    def may_accumulate(self, key: str) -> bool:
        """Whether a gradient from outside of graphs can wait, the same on all ranks: there is room for it."""
        spec = self._records[key].spec
        if self._ranks == 1 or spec.strategy.accumulates_on is None:
            return False
        if key not in self._waiting:
            number = self._numbers[key] - 2 * len(self._numbers)
            why = "reduced outside of graphs"
            bucket = exact_bucket(number, [spec], is_frozen=False, why=why)
            on_host = spec.strategy.uses_host and spec.strategy.accumulates_on is not GradientOn.GPU
            size_bytes = bucket.waiting_gradient_bytes if on_host else 0
            memory = self._host_memory
            if size_bytes > memory.budget.bytes - memory.planned_bytes:
                return False
            memory.unplanned_bytes += size_bytes
            tier = Tier.HOST if on_host else Tier.GPU
            self._placements[number] = Placement(
                bucket=number, tier=Tier.NONE, gradient_tier=tier, why=why
            )
            self._waiting[key] = bucket
        return True

    def accumulate(self, key: str, grad: Tensor) -> Tensor:
        """Let a full gradient wait for the next micro-batch's; negative zeros for autograd to add to `.grad`.

        Nothing is sent between nodes, if the strategy's gradients wait before that.
        """
        spec, bucket = self._records[key].spec, self._waiting[key]
        params = (spec.name,)
        with self._cost.counted(spec.name):
            self._accumulation.begin_graph(backward_number(), accumulates=True)
            part = self._eager.reduce_to_wait(spec, grad)
            wide = torch.promote_types(spec.reduce_dtype, torch.float32)
            total = self._accumulation.collect(bucket, params, part, wide)
            self._accumulation.accumulate(bucket, params, total).wait()
        device = grad.device if spec.computes_on is None else "cpu"
        return torch.full(spec.local_shape, -0.0, dtype=spec.home_dtype, device=device)

    # --- warnings -----------------------------------------------------------------------------------------

    def note_graphs(self) -> None:
        """Note that graphs were compiled: reads outside of them are a loss now, and are warned of."""
        self._cost.has_graphs = True

    def give_way(self, keys: Iterable[str]) -> None:
        """Release these parameters' own copies, because a graph's bucket takes their place.

        No home shard was released for such a copy.  All ranks must call it.
        """
        for key in keys:
            if (own := self._own.pop(key, None)) is not None:
                self._cache.drop(own.id)
                self._host_memory.unplanned_bytes -= self._on_host(own)
                del self._placements[own.id]

    # --- buckets ------------------------------------------------------------------------------------------

    def _bucket_for(self, key: str) -> Bucket | None:
        """The bucket that serves a parameter, the same on all ranks; None if no copy is to be kept."""
        spec = self._records[key].spec
        parameter = self._records[key].living()
        is_frozen = parameter is not None and not parameter.requires_grad
        if not _keeps(spec, fitted(spec, is_frozen=is_frozen)):
            return None
        found = self._copied(key)
        if found is not None and found.frozen == is_frozen:
            return found
        return exact_bucket(
            self._numbers[key] - is_frozen,
            [spec],
            is_frozen=is_frozen,
            why="used outside of graphs",
        )

    def _copied(self, key: str) -> Bucket | None:
        """A bucket with exact values of a parameter of which there is a copy, perhaps an outdated one."""
        own = [self._own[key]] if key in self._own else []
        for bucket in (*self._buckets.of(key), *own):
            is_there = self._cache.generation(bucket.id) is not None
            keeps = _keeps(self._records[key].spec, bucket.strategy)
            if is_there and keeps and bucket.wire is Format.FULL:
                return bucket
        return None

    def _has_room(self, key: str, bucket: Bucket) -> bool:
        """Whether this rank can keep a copy of the bucket; makes its own bucket's placement known."""
        own = self._own.get(key)
        if bucket.id >= 0 or own == bucket:
            return True
        # The check reads the placement of a bucket without room, too.
        tier = _TIERS.get(bucket.strategy.cache, Tier.HOST)
        self._placements[bucket.id] = Placement(
            bucket=bucket.id, tier=tier, gradient_tier=Tier.NONE, why="used outside of graphs"
        )
        memory = self._host_memory
        given_back = 0 if own is None else self._on_host(own)
        free_bytes = memory.budget.bytes - memory.planned_bytes + given_back
        return tier is not Tier.HOST or bucket.host_bytes <= free_bytes

    def _on_host(self, own: Bucket) -> int:
        """The bytes of host memory that a parameter's own bucket takes."""
        return own.host_bytes if self._placements[own.id].tier is Tier.HOST else 0

    def _keep(self, key: str, bucket: Bucket) -> None:
        """Let this bucket serve the parameter, instead of an earlier bucket of the parameter's own.

        Also release the copies of parameters that the model no longer has, such as a deleted adapter's.
        """
        if self._own.get(key) == bucket:
            return
        self.give_way([key])
        while self._gone:
            if not self._records[gone := self._gone.pop()].places():
                self.give_way([gone])
        if bucket.id < 0:
            self._watch(key)
            self._own[key] = bucket
            self._host_memory.unplanned_bytes += self._on_host(bucket)

    def _watch(self, key: str) -> None:
        """Note it in `_gone` when a module of the parameter goes."""
        if key not in self._watched:
            self._watched.add(key)
            for module, _ in self._records[key].owners():
                weakref.finalize(module, self._gone.append, key).atexit = False

    def _loaded(self, keys: Sequence[str], bucket: Bucket) -> list[Tensor]:
        """Whole parameters out of a valid copy of their bucket."""
        pending = self._cache.load(bucket, self._validity.generation(bucket))
        count = bucket.slots if pending.is_full else bucket.slots_per_node_shard
        is_whole = bucket.ranks_per_node == 1 or pending.is_full
        slots = pending.wait().view(count, bucket.slot_elements)
        places = self._records.keys_of(bucket)
        found = []
        for key in keys:
            place = bucket.params[places.index(key)]
            rows = slots.narrow(1, place.offset, place.layout.slot_elements)
            if is_whole:  # the cache's copy must not be returned
                whole = rows.clone(memory_format=torch.contiguous_format).view(-1)
            else:
                kind = Kind.INTRA_ALL_GATHER
                name = range_name(kind, bucket)
                whole = self._collectives.all_gather(kind, rows.reshape(-1), name).wait()
            found.append(unpack_full(whole, [place.layout])[0])
        return found


def _keeps(spec: ParamSpec, strategy: Strategy) -> bool:
    """Whether a copy is to be kept, so that less is sent between nodes or released shards stay so.

    strategy: of the parameter's bucket.
    """
    return strategy.is_resident and (spec.layout.nodes > 1 or strategy.keeps_on_host)


def _about(spec: ParamSpec, act: str, bucket: Bucket) -> About:
    """What ranks compare: no act has the text of another one that sends other things."""
    act = act if bucket.id < 0 else f"{act} with bucket {bucket.id}"
    question = f"the agreement before a rank {gathers(spec)}"
    return About(digest="", mode=act, describe=lambda: act, question=question)


class _Cost:
    """What reads outside of graphs cost, for one warning.

    has_graphs: whether the model has graphs.
    """

    def __init__(self, counters: Counters, *, is_first: bool) -> None:
        self.has_graphs = False
        self._has_warned = False
        self._counters = counters
        self._is_first = is_first
        self._step = -1
        self._names: dict[str, None] = {}
        self._between_bytes = self._other_bytes = 0

    @contextmanager
    def counted(self, name: str) -> Iterator[None]:
        """Count what is moved within the block; warn once, after a whole step that graphs ran in, too."""
        if not self.has_graphs or self._has_warned:
            yield
            return
        if self._step != self._counters.steps:
            self._warn()
            self._step = self._counters.steps
            self._names, self._between_bytes, self._other_bytes = {}, 0, 0
        sent = dict(self._counters.sent)
        yield
        self._names[name] = None
        for kind, now in self._counters.sent.items():
            between = kind in _BETWEEN_NODES
            self._between_bytes += between * (now - sent.get(kind, 0))
            self._other_bytes += (not between) * (now - sent.get(kind, 0))

    def _warn(self) -> None:
        # The first step with graphs is not a whole one, and gathers what later steps keep.
        if self._step < 1 or not self._names:
            return
        self._has_warned = True
        if self._is_first:
            log.warning(
                "parameters of a compiled model (%d; %r is one) are used outside of its graphs: a part of "
                "the model was not compiled (a graph break, or torch._dynamo.config.recompile_limit), or "
                "the model is also called without torch.compile; the numbers are right, but in the last "
                "step this rank waited for %d bytes from other nodes and %d bytes within its node, which "
                "no compute hides (fcdp_compile.explain(model) names parameters and reasons)",
                len(self._names),
                next(iter(self._names)),
                self._between_bytes,
                self._other_bytes,
            )
