"""A sharded model at run time: its parameters, groups, cache, generations and counters, under one owner."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fcdp_compile.devices import Device
from fcdp_compile.params.mesh import Topology
from fcdp_compile.params.packing import pack_home
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.params.spec import Home
from fcdp_compile.plan import Bucket, Kind, Plan
from fcdp_compile.plan.reduction import REDUCTIONS
from fcdp_compile.runtime.cache.codecs import Codecs
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.cache.host_cache import NodeShardCache
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.cache.released import release
from fcdp_compile.runtime.cache.row_sources import RowSources
from fcdp_compile.runtime.collectives.agreement import About, Question, any_rank
from fcdp_compile.runtime.collectives.collectives import Collectives, are_blocking
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.eager import Alone
from fcdp_compile.runtime.lanes.lanes import Lanes, range_name
from fcdp_compile.runtime.lanes.pending import Pending
from fcdp_compile.runtime.optimizers.gradients import Accumulation
from fcdp_compile.runtime.optimizers.hooks import OptimizerHooks, WholeParameter
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.runtime.parameters.unset import Awaited
from fcdp_compile.runtime.parameters.validity import Generations, Seals
from fcdp_compile.strategy import Scope
from fcdp_compile.strategy.gathering import Algorithm

log = logging.getLogger(__name__)


class ShardedModel:
    """What the executor of every compiled graph of one model shares."""

    def __init__(
        self,
        number: int,
        topology: Topology,
        records: Iterable[ParamRecord],
        device: Device,
        awaited: Iterable[str] = (),
        awaited_buffers: Iterable[str] = (),
        *,
        accumulates_elsewhere: bool = False,
    ) -> None:
        self.number = number
        self.topology = topology
        self.records = {r.spec.key: r for r in records}
        self.without_values = Awaited(
            {key: self.records[key].spec.name for key in awaited}, awaited_buffers
        )
        self.strategies = tuple(dict.fromkeys(r.spec.strategy for r in self.records.values()))
        self.accumulates = any(strategy.accumulates_on for strategy in self.strategies)
        self.device = device
        self.counters = Counters()
        self.lanes = Lanes.shared(topology, device, is_blocking=are_blocking(topology, device))
        self.collectives = Collectives(topology, self.counters, self.lanes)
        self._alone = Alone(topology, self.collectives)
        self.pool = PinnedPool(device)
        self.host_memory = HostMemory(topology)
        self.codecs = Codecs()
        self.cache = NodeShardCache(self.counters, self.pool, self.lanes, self.codecs)
        self.accumulation = Accumulation(
            {r.spec.name: r for r in self.records.values()},
            self.counters,
            self.pool,
            self.lanes,
            self.collectives,
            self.codecs,
            reductions=self._reductions_of_waiting,
        )
        self.generations = Generations(self.records)
        self.seals = Seals()
        self.whole: dict[str, WholeParameter] = {}
        self.row_sources = RowSources()
        self._buckets: dict[str, list[Bucket]] = {}
        self.next_bucket = 0
        # Of adaptive placement: bytes on the device by bucket as last planned, the highest predicted peak.
        self._planned_bytes: dict[int, int] = {}
        self.predicted_peak_bytes: int | None = None
        self.gpu_bytes: int | None = None  # of the smallest GPU of all ranks
        self._graphs = 0
        self.plans: dict[int, Plan] = {}  # by the number of the graph, for people
        self._has_warned = False
        self._has_warned_of_given = False
        self._keys = {r.spec.name: key for key, r in self.records.items()}
        weakref.finalize(self, self.host_memory.end)
        self.optimizer_hooks = OptimizerHooks(
            topology,
            self.collectives,
            self.counters,
            self.records,
            self.without_values,
            self.whole,
            self.accumulation,
            self.generations,
            accumulates_elsewhere=accumulates_elsewhere and not self.accumulates,
        )

    def home_of(self, bucket: Bucket) -> Home:
        """Where this rank is among those that share one copy of a bucket."""
        return self.topology.home(bucket.strategy.home)

    def _reductions_of_waiting(self, bucket: Bucket) -> list[Kind]:
        """What gradients still go through that accumulated at their strategy's scope."""
        kinds = list(REDUCTIONS[bucket.strategy.home])
        if bucket.strategy.gradient is not Scope.NONE:
            kinds.remove(Kind.INTRA_REDUCE_SCATTER)
        return [k for k in kinds if self.collectives.group_size(k) > 1]

    # --- what the traced ops need (registry.Owner) -------------------------------------------------------

    def spec(self, key: str) -> ParamSpec:
        """The parameter's spec."""
        return self.records[key].spec

    def gather_eagerly(self, key: str, shard: Tensor) -> Tensor:
        """Gather one parameter now, past buckets and cache."""
        spec = self.spec(key)
        self.refuse_awaited("a forward")
        if spec.layout.nodes > 1:
            self._warn_of_eager_gathers(spec.name)
        self.records[key].living()  # raises if what was put there holds other rows
        return self.gather(key, shard, spec.gather_dtype)

    def gather(self, key: str, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather one parameter in a dtype from this rank's `shard`; memory of its own."""
        return self._alone.gather(self.spec(key), shard, dtype)

    def _warn_of_eager_gathers(self, name: str) -> None:
        if self._has_warned or not self._graphs:
            return
        self._has_warned = True
        if self.topology.node == self.topology.place == 0:
            log.warning(
                "parameter %r of a compiled model is gathered eagerly, past the cache: a part of the "
                "model was not compiled (a graph break, or torch._dynamo.config.recompile_limit); the "
                "numbers are right but it crosses between nodes at every use "
                "(TORCH_LOGS=graph_breaks,recompiles says why)",
                name,
            )

    def reduce_eagerly(self, key: str, grad: Tensor) -> Tensor:
        """Average one full gradient over all ranks now and return this rank's shard of it."""
        return self._alone.reduce(self.spec(key), grad)

    def make_groups(self) -> None:
        """Make the groups that only some strategies need, with all ranks of the mesh."""
        flat = (Algorithm.RING, Algorithm.AUTO)
        if any(strategy.algorithm in flat for strategy in self.strategies):
            self.collectives.make_flat_group()

    # --- host memory --------------------------------------------------------------------------------------

    def agree_on_host_memory(self) -> None:
        """Find the budget of a cache on the host, with all ranks of the mesh."""
        if any(strategy.uses_host for strategy in self.strategies):
            is_pinned = self.device.registers
            self.host_memory.agree(self.collectives, self.pool, is_pinned=is_pinned)

    # --- buckets ------------------------------------------------------------------------------------------

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Make the buckets of a graph known."""
        for bucket in buckets:
            self.next_bucket = max(self.next_bucket, bucket.id + 1)
            for key in self.keys_of(bucket):
                if bucket not in self._buckets.setdefault(key, []):
                    self._buckets[key].append(bucket)

    def known_buckets(self) -> dict[str, tuple[Bucket, ...]]:
        """Every bucket of each parameter in the order of their making; none that lost a parameter since.

        All of them, so that what a graph reuses does not depend on which graph was compiled before it.
        """
        living = {key for key, record in self.records.items() if record.living() is not None}
        return {
            key: tuple(b for b in buckets if living.issuperset(self.keys_of(b)))
            for key, buckets in self._buckets.items()
        }

    def release_rivals(self, bucket: Bucket) -> None:
        """Give back the cached copies of buckets that this one replaces: of parameters frozen or unfrozen."""
        for key in self.keys_of(bucket):
            for other in self._buckets.get(key, ()):
                if other.frozen != bucket.frozen:
                    self.shards(other)  # those it alone has come back first
                    self.cache.drop(other.id)

    def kept_by_others(self, bucket_ids: Sequence[int]) -> int:
        """Bytes that graphs compiled before want to keep on the device of buckets other than these."""
        return sum(size for i, size in self._planned_bytes.items() if i not in bucket_ids)

    def note_placement(self, planned_bytes: dict[int, int], peak_bytes: int) -> None:
        """A graph was planned to keep these bytes of its buckets on the device and to reach that peak."""
        self._planned_bytes |= planned_bytes
        self.predicted_peak_bytes = max(peak_bytes, self.predicted_peak_bytes or 0)

    def next_graph(self) -> int:
        """Number the next compiled graph of this model."""
        self._graphs += 1
        return self._graphs - 1

    def keys_of(self, bucket: Bucket) -> list[str]:
        """The keys of a bucket's parameters."""
        return [self._keys[p.name] for p in bucket.params]

    def _specs_of(self, bucket: Bucket) -> list[ParamSpec]:
        return [self.records[key].spec for key in self.keys_of(bucket)]

    def generation(self, bucket: Bucket) -> int:
        """The generation of a bucket's parameters."""
        return self.generations.of(self.keys_of(bucket))

    def shards(self, bucket: Bucket) -> list[Tensor]:
        """This rank's home shards of a bucket."""
        return [self.records[key].local() for key in self.keys_of(bucket)]

    def parameters(self, bucket: Bucket) -> list[nn.Parameter]:
        """The parameters of a bucket as they are now."""
        return [self.records[key].parameter() for key in self.keys_of(bucket)]

    def release_shards(self, bucket: Bucket) -> None:
        """Give back the device memory of the home shards of a bucket that is valid in the cache."""
        release(
            bucket,
            self._specs_of(bucket),
            self.parameters(bucket),
            self.cache,
            self.home_of(bucket).node,
        )

    # --- validity -----------------------------------------------------------------------------------------

    def not_its_own(self, shards: dict[str, Tensor]) -> list[str]:
        """The names of the parameters, by key, in whose place a graph is given anything but the home shard.

        An empty shard says nothing; another rank's does.
        """
        return [
            self.records[key].spec.name
            for key, shard in shards.items()
            if not self.records[key].is_home(shard)
        ]

    def warn_of_given(self, names: Sequence[str]) -> None:
        """Say once that a compiled function runs on other values than the model's own."""
        if self._has_warned_of_given or not names:
            return
        self._has_warned_of_given = True
        log.warning(
            "a compiled function was given other values than the model's own for %r (one of %d parameters), "
            "as torch.func.functional_call does: every parameter is then gathered by itself, between nodes "
            "too, at every use; for a fixed second set of values, such as a teacher, shard a second model",
            names[0],
            len(names),
        )

    def stale(
        self, buckets: Sequence[Bucket], about: About, *, is_given: bool = False
    ) -> tuple[list[Bucket], bool]:
        """Agree with all ranks on what is about to run, and on which of these buckets are to be gathered.

        Those that the cache lacks or has outdated on any rank; where whole buckets may be kept, they agree on
        those besides.  The second result says whether any rank was given other values than the model's own.

        Raises: PlanMismatchError on every rank if ranks are about to run different plans, FcdpError on every
        rank if anything has no values yet.
        """
        self.refuse_awaited("a forward")
        self.look(buckets)
        outdated = [self.cache.generation(b.id) != self.generation(b) for b in buckets]
        choosing = [b for b in buckets if b.strategy.may_keep_full and b.ranks_per_node > 1]
        refused = [not self.cache.wants_in_full(b) for b in choosing]
        *agreed, is_given = any_rank(self.collectives, about, [*outdated, *refused, is_given])
        for bucket, mine_too, is_stale in zip(buckets, outdated, agreed, strict=False):
            if is_stale and not mine_too:
                # Another rank's shard changed: the copy here is as outdated as there.
                self.generations.change(self.keys_of(bucket))
        for bucket, is_refused in zip(choosing, agreed[len(buckets) :], strict=True):
            self._settle_full(bucket, agreed=not is_refused)
        return [b for b, is_stale in zip(buckets, agreed, strict=False) if is_stale], is_given

    def _settle_full(self, bucket: Bucket, *, agreed: bool) -> None:
        if agreed and not self.cache.keeps_in_full(bucket):
            self.shards(bucket)  # those that only the host's copy has come back before it goes
        self.cache.agree_in_full(bucket, self.home_of(bucket), agreed=agreed)

    def look(self, buckets: Sequence[Bucket]) -> None:
        """Find out what of these buckets may have changed since the last look: that has a new generation.

        Not of those that every rank has whole, which nobody gathers again: autograd has saved their
        parameters for the backward, and sees every change but those by optimizers, which generations tell.
        """
        keys = dict.fromkeys(k for b in buckets if b.ranks > 1 for k in self.keys_of(b))
        if found := self.seals.changed({key: self.records[key].parameter() for key in keys}):
            self.generations.change(found)
            for key in found:
                self.records[key].local()  # raises if what was put there is no home shard

    def ask_if_found(self, found: Sequence[object], act: str, what: str) -> Question:
        """Start to ask all ranks whether any found something (`agreement.Question`); all must."""
        return Question(self.collectives, act, [len(found) > 0], what)

    def refresh(self, bucket: Bucket) -> None:
        """Gather a bucket between nodes straight into the cache; within the node too if it is kept whole."""
        dtype = getattr(torch, bucket.dtype)
        shards = self.shards(bucket)
        home = pack_home(shards, [p.layout for p in bucket.params], dtype)
        if bucket.frozen and any(home.data_ptr() == s.data_ptr() for s in shards):
            # A group's own thread lets go of what it sent a little after the gather, and shards that anybody
            # holds cannot be released.
            home = home.clone()
        node_shard = Pending(home)
        if bucket.nodes > 1:
            node_shard = self._of_all_nodes(bucket, home)
        generation = self.generation(bucket)
        stored = self.cache.store(bucket, node_shard, generation)
        if self.cache.keeps_in_full(bucket):
            kind = Kind.INTRA_ALL_GATHER
            full = self.collectives.all_gather(kind, stored, range_name(kind, bucket))
            self.cache.keep_full(bucket, generation, full)
            stored = full
        stored.wait()

    @property
    def awaited(self) -> set[str]:
        """The keys of parameters without values yet."""
        return self.without_values.keys

    @property
    def awaited_buffers(self) -> set[str]:
        """The names of buffers without values yet, which are on meta."""
        return self.without_values.buffers

    def refuse_awaited(self, what: str) -> None:
        """Raise on every rank if any tensor is without values, which `what` needs; all ranks must ask.

        Raises: FcdpError.
        """
        self.without_values.refuse(what, self.collectives)

    def values_arrived(self, keys: Iterable[str], buffers: Iterable[str] = ()) -> None:
        """All of these parameters (by key) was written, and of these buffers (by name); caches go stale."""
        written = list(keys)
        self.without_values.arrived(written, buffers)
        self.generations.change(written)

    def _of_all_nodes(self, bucket: Bucket, home: Tensor) -> Pending:
        """The node shard of a bucket: read on this node where it can be, else gathered between nodes."""
        specs, at = self._specs_of(bucket), self.home_of(bucket)
        read = self.row_sources.node_shard(bucket, specs, home, at, self.collectives)
        if read is not None:
            return Pending(read)
        kind = Kind.INTER_ALL_GATHER
        codec = self.codecs.of_weights(bucket)
        return self.collectives.all_gather(kind, home, range_name(kind, bucket), codec=codec)

    def values_loaded(self) -> None:
        """A state dict was loaded: every parameter may have changed."""
        self.generations.change(self.records)
