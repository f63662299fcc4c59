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

import torch
from torch import Tensor

from fcdp_compile.core.params.home_shard import bring_back_inputs
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.plan import Tier
from fcdp_compile.plan.kinds import INTER_KINDS
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.model_buckets import ModelBuckets
from fcdp_compile.runtime.buckets.validity import Validity
from fcdp_compile.runtime.cache.host_budget import HostMemory
from fcdp_compile.runtime.collectives.agreement import About, same_act
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.runtime.optimizers.gradients import Accumulation
from fcdp_compile.runtime.parameters.record import Records
from fcdp_compile.torch_compat.autograd import backward_number

log = logging.getLogger(__name__)

_BETWEEN_NODES = frozenset(kind.value for kind in INTER_KINDS)


class OutsideReads:
    """The reads of one model's parameters outside of graphs.

    [Note: what is compared] Without a plan, two ranks may gather different parameters of one size, and would
    both get a mixture of the two.  So before each collective, ranks compare which parameter it is for.

    Raises, where it communicates: PlanMismatchError on every rank if ranks are about to do different things.
    """

    def __init__(
        self,
        records: Records,
        buckets: ModelBuckets,
        validity: Validity,
        host_memory: HostMemory,
        accumulation: Accumulation,
    ) -> None:
        transport = buckets.transport
        self._records = records
        self._buckets = buckets
        self._validity = validity
        self._host_memory = host_memory
        self._accumulation = accumulation
        self._topology = transport.topology
        self._collectives = transport.collectives
        self._transfers = transport.home_transfers
        self._waiting: dict[str, BoundBucket] = {}  # of gradients
        self._own: dict[str, BoundBucket] = {}
        # Parameters that have had own buckets, and those of them of which a module has gone.
        self._watched: set[str] = set()
        self._gone: list[str] = []
        is_first = self._topology.node == self._topology.place == 0
        self._cost = _Cost(transport.counters, is_first=is_first)

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
                return self.gather(key, shard, spec.gather_dtype)
            may_keep = self._records[key].is_home(shard) and self._has_room(key, bucket)
            about = _about(f"{_gathers(spec)} for a forward", spec, bucket)
            verdict = self._validity.check([bucket], about, is_given=not may_keep)
            if verdict.is_given:
                bring_back_inputs([shard])
                return self.gather(key, shard, spec.gather_dtype)
            self._keep(key, bucket)
            if verdict.stale[bucket.id]:
                bucket.refresh()
            return bucket.params_of_copy([key])[0]

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
        copied: dict[BoundBucket, list[str]] = {}
        for key, _, dtype in wanted:
            bucket = self._copied(key) if self._records[key].spec.gather_dtype is dtype else None
            if bucket is not None:
                copied.setdefault(bucket, []).append(key)
        found: dict[str, Tensor] = {}
        for bucket, keys in copied.items():
            spec = self._records[keys[0]].spec
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            about = _about(f"reads a copy of parameter {spec.name!r}{more}", spec, bucket)
            is_stale = self._validity.check([bucket], about).stale[bucket.id]
            if is_stale and len(keys) == len(bucket.keys):
                bucket.refresh()
                is_stale = False
            if not is_stale:
                found |= zip(keys, bucket.params_of_copy(keys), strict=True)
        return [
            found[key] if key in found else self.gather(key, shard, dtype)
            for key, shard, dtype in wanted
        ]

    def gather(self, key: str, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """Gather a parameter by itself in a dtype from this rank's `shard`, into new memory."""
        spec = self._records[key].spec
        bucket = self._buckets.alone(key, dtype, is_frozen=False)
        shard = self._transfers.shard_to_device(spec, shard)
        if bucket.bucket.ranks > 1:
            same_act(self._collectives, _gathers(spec))
        (whole,) = bucket.gathered(bucket.packed([shard]))
        # An op must not return its input; `whole` is the input if nothing was gathered or cast.
        return whole.clone() if whole.data_ptr() == shard.data_ptr() else whole

    # --- gradients ----------------------------------------------------------------------------------------

    def reduce(self, key: str, grad: Tensor) -> Tensor:
        """Average a full gradient over all ranks and return this rank's shard of it.

        Gradients of the parameter that wait (`accumulate`) are in it, and then wait no longer.
        """
        spec = self._records[key].spec
        with self._cost.counted(spec.name):
            if not self._accumulation.is_on and self._accumulation.concerns():
                self._accumulation.begin_graph(backward_number(), accumulates=False)
            if self._topology.ranks > 1:
                same_act(self._collectives, f"reduces the gradient of parameter {spec.name!r}")
            bucket = self._buckets.alone(key, spec.gather_dtype, is_frozen=False)
            before, after = bucket.reductions
            grads = bucket.reduced(before, Pending(bucket.packed_grad(grad)))
            if self._accumulation.waits_for([bucket]):
                params = (spec.name,)
                grads = self._accumulation.collect(bucket, params, grads, spec.reduce_dtype)
            (part,) = bucket.grad_shards(bucket.reduced(after, grads).wait())
            part = self._transfers.grad_to_home(spec, part)
            return part.clone() if part.data_ptr() == grad.data_ptr() else part

    def may_accumulate(self, key: str) -> bool:
        """Whether a gradient from outside of graphs can wait, the same on all ranks: there is room for it."""
        spec = self._records[key].spec
        if self._topology.ranks == 1 or spec.strategy.accumulates_on is None:
            return False
        if key not in self._waiting:
            bucket = self._buckets.alone(key, spec.gather_dtype, is_frozen=False)
            on_host = bucket.placement.gradient_tier is Tier.HOST
            size_bytes = bucket.bucket.waiting_gradient_bytes if on_host else 0
            memory = self._host_memory
            if size_bytes > memory.budget.bytes - memory.planned_bytes:
                return False
            memory.unplanned_bytes += size_bytes
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
            same_act(self._collectives, f"accumulates the gradient of parameter {spec.name!r}")
            part = bucket.reduced(bucket.reductions[0], Pending(bucket.packed_grad(grad)))
            wide = torch.promote_types(spec.reduce_dtype, torch.float32)
            total = self._accumulation.collect(bucket, params, part, wide)
            self._accumulation.accumulate(bucket, params, total).wait()
        device = spec.home_device(grad.device)
        return torch.full(spec.local_shape, -0.0, dtype=spec.home_dtype, device=device)

    # --- warnings -----------------------------------------------------------------------------------------

    def note_graphs(self) -> None:
        """Note that graphs were compiled: reads outside of them are a loss now, and are warned of."""
        self._cost.has_graphs = True

    # --- buckets ------------------------------------------------------------------------------------------

    def give_way(self, keys: Iterable[str]) -> None:
        """Release these parameters' own copies, because a graph's bucket takes their place.

        No home shard was released for such a copy.  All ranks must call it.
        """
        for key in keys:
            if (own := self._own.pop(key, None)) is not None:
                own.cache.drop()
                self._host_memory.unplanned_bytes -= _on_host(own)

    def _bucket_for(self, key: str) -> BoundBucket | None:
        """The bucket that serves a parameter, the same on all ranks; None if no copy is to be kept."""
        spec = self._records[key].spec
        parameter = self._records[key].living()
        is_frozen = parameter is not None and not parameter.requires_grad
        alone = self._buckets.alone(key, spec.gather_dtype, is_frozen=is_frozen)
        if not _keeps_copies(alone):
            return None
        found = self._copied(key)
        return found if found is not None and found.bucket.frozen == is_frozen else alone

    def _copied(self, key: str) -> BoundBucket | None:
        """A bucket with exact values of a parameter whose copy exists, maybe stale.

        In the parameter's gather dtype: a graph may gather it in a lower one (`passes.narrow`).
        """
        dtype = self._records[key].spec.gather_dtype
        own = [self._own[key]] if key in self._own else []
        for bucket in (*self._buckets.of(key), *own):
            is_exact = bucket.bucket.wire.is_exact and bucket.dtype is dtype
            if is_exact and bucket.cache.generation is not None and _keeps_copies(bucket):
                return bucket
        return None

    def _has_room(self, key: str, bucket: BoundBucket) -> bool:
        """Whether this rank can keep a copy of the bucket."""
        own, memory = self._own.get(key), self._host_memory
        if bucket.is_planned or own is bucket or not _on_host(bucket):
            return True
        given_back = 0 if own is None else _on_host(own)
        return _on_host(bucket) <= memory.budget.bytes - memory.planned_bytes + given_back

    def _keep(self, key: str, bucket: BoundBucket) -> None:
        """Let this bucket serve the parameter, instead of an earlier bucket of the parameter's own.

        Also release the copies of parameters that the model no longer has, such as a deleted adapter's.
        """
        if self._own.get(key) is bucket:
            return
        self.give_way([key])
        while self._gone:
            if not self._records[gone := self._gone.pop()].places():
                self.give_way([gone])
        if not bucket.is_planned:
            self._watch(key)
            self._own[key] = bucket
            self._host_memory.unplanned_bytes += _on_host(bucket)

    def _watch(self, key: str) -> None:
        """Note it in `_gone` when a module of the parameter goes."""
        if key not in self._watched:
            self._watched.add(key)
            for module, _ in self._records[key].owners():
                weakref.finalize(module, self._gone.append, key).atexit = False


def _keeps_copies(bucket: BoundBucket) -> bool:
    """Whether a copy is to be kept, so that less is sent between nodes or released shards stay so."""
    strategy = bucket.bucket.strategy
    return strategy.is_resident and (bucket.bucket.nodes > 1 or strategy.keeps_on_host)


def _on_host(bucket: BoundBucket) -> int:
    """The bytes of host memory that a copy of the bucket takes."""
    return bucket.bucket.host_bytes if bucket.placement.tier is Tier.HOST else 0


def _gathers(spec: ParamSpec) -> str:
    """The text by which ranks compare that all of them gather this parameter."""
    return f"gathers parameter {spec.name!r}"


def _about(act: str, spec: ParamSpec, bucket: BoundBucket) -> About:
    """What ranks compare: no act has the text of another one that sends other things."""
    act = f"{act} with bucket {bucket.id}" if bucket.is_planned else act
    question = f"the agreement before a rank {_gathers(spec)}"
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
