"""Gradients of micro-batches that wait for the one that synchronises, as within `fcdp_compile.no_sync`.

A strategy says whether gradients wait whole, before any reduction, or after the reduction within the node:

    accumulating backward   pack [G*S] -> reduced within the node [N*S] -> + waiting sum -> waits
    collecting backward     pack [G*S] -> reduced within the node [N*S] -> + waiting sum -> inter -> .grad

Sums are in fp32 or wider, on the device or in host memory (`Placement.gradient_tier`).  A synchronising
backward may have no gradients to add to those that wait, such as for a parameter that its micro-batch did not
use; these are reduced at its end.

[Note: end of a backward] Between a graph's backward and the end of the whole backward, gradients are neither
here nor in `.grad`: autograd may still wait for gradients of another graph, and a backward may fail.  So the
gradients that a graph touches count as lost until autograd says that all is done.  If autograd did not touch
a parameter's `.grad`, as in `torch.autograd.grad`, its gradients stay lost.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import Kind, Tier
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.transport import Transport
from fcdp_compile.runtime.collectives.agreement import same_act
from fcdp_compile.runtime.lanes.lanes import range_name, tensor_of
from fcdp_compile.runtime.lanes.tasks import Pending, passed_on
from fcdp_compile.runtime.optimizers.gradient_marks import Grad, GradientMarks
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.torch_compat.autograd import at_end_of_backward

_Params = tuple[str, ...]
"""Names of parameters that one graph reduces together: some or all of a bucket's, in its order."""


@dataclass(slots=True)
class _Waiting:
    """kept: the sum so far, rows of slots of the parameters.  slab: the same tensor if it is on the host.

    Compute has already waited for the sum.
    """

    kept: Tensor
    bucket: BoundBucket
    slab: Tensor | None

    @property
    def slab_bytes(self) -> int:
        return 0 if self.slab is None else self.slab.nbytes


class _Backward:
    """A backward that is under way; autograd holds this object until the backward ends or fails."""


class Accumulation:
    """The gradients of one model that wait on this rank, and the backwards that add to them or take them.

    A graph's backward first says that it begins (`begin_graph`).  Its steps then `collect` what waits and, if
    it accumulates, let the sum wait again (`accumulate`).  When autograd has ended the whole backward, what
    still waits is reduced, if any of its graphs synchronises ([Note: end of a backward]).

    is_on: whether forwards that begin now accumulate in their backward.
    """

    def __init__(self, records: Mapping[str, ParamRecord], transport: Transport) -> None:
        self.is_on = False
        self._records = records
        self._transport = transport
        self._counters = transport.counters
        self._lanes = transport.lanes
        self._collectives = transport.collectives
        self._marks = GradientMarks(records)
        self._waiting: dict[_Params, _Waiting] = {}
        self._slabs: dict[_Params, Tensor] = {}  # never given back between steps
        # Of one backward and those nested in it: their numbers, whether any of their graphs synchronises, and
        # the parameters whose waiting gradients these graphs took or added to, with `.grad` as it was.
        self._under_way: dict[int, weakref.ref[_Backward]] = {}
        self._synchronises = False
        self._touched: dict[str, Grad] = {}

    # --- steps of a graph ---------------------------------------------------------------------------------

    def collect(
        self, bucket: BoundBucket, params: _Params, grads: Tensor | Pending, dtype: torch.dtype
    ) -> Pending:
        """Add `grads` [n] and the gradients that wait, which then wait no longer; result in `dtype`."""
        waiting = self._waiting.pop(params, None)
        self._counters.add(Kind.COLLECT, 0 if waiting is None else waiting.slab_bytes)
        if waiting is not None:
            self._touch(params)
            return self._sum(bucket, waiting, grads, dtype)
        if tensor_of(grads).dtype == dtype:
            return passed_on(grads)
        return self._cast(bucket, grads, dtype)

    def _cast(self, bucket: BoundBucket, grads: Tensor | Pending, dtype: torch.dtype) -> Pending:
        own = tensor_of(grads)
        out = torch.empty_like(own, dtype=dtype)
        run = partial(out.copy_, own)
        name = range_name(Kind.COLLECT, bucket.bucket)
        return self._lanes.start(Kind.COLLECT.lane, run, out=out, reads=[grads], name=name)

    def _sum(
        self, bucket: BoundBucket, waiting: _Waiting, grads: Tensor | Pending, dtype: torch.dtype
    ) -> Pending:
        """Write the sum to the waiting gradients on the device, or to new memory if they are on the host."""
        own, kept = tensor_of(grads), waiting.kept
        is_on_host = waiting.slab is not None
        total = torch.empty_like(kept, device=own.device) if is_on_host else kept
        out = total if total.dtype == dtype else torch.empty_like(own, dtype=dtype)

        def run() -> None:
            if is_on_host:
                total.copy_(kept, non_blocking=True)
            total.add_(own)
            if out is not total:
                out.copy_(total)

        name = range_name(Kind.COLLECT, bucket.bucket)
        return self._lanes.start(Kind.COLLECT.lane, run, out=out, reads=[grads, total], name=name)

    def accumulate(self, bucket: BoundBucket, params: _Params, total: Tensor | Pending) -> Pending:
        """Let the sum [n] wait; this backward adds it to no `.grad`."""
        own = tensor_of(total)
        self._touch(params)
        if bucket.placement.gradient_tier is not Tier.HOST:
            self._counters.add(Kind.ACCUMULATE, 0)
            done = total.done if isinstance(total, Pending) else None
            # A tensor that no lane has made may be the gradient itself, which others may hold, too.
            kept = own if done is not None else own.clone()
            self._waiting[params] = _Waiting(kept, bucket, None)
            return Pending(kept, done=done)
        if params not in self._slabs:
            self._slabs[params] = self._transport.pool.take(own.numel(), own.dtype)
        slab = self._slabs[params]
        self._counters.add(Kind.ACCUMULATE, own.nbytes)
        stored = self._lanes.start(
            Kind.ACCUMULATE.lane,
            lambda: slab.copy_(own, non_blocking=True),
            out=slab,
            reads=[total],
            name=range_name(Kind.ACCUMULATE, bucket.bucket),
        )
        self._waiting[params] = _Waiting(slab, bucket, slab)
        return stored

    def _touch(self, params: _Params) -> None:
        for name in params:
            if name not in self._touched:
                self._touched[name] = self._marks.grad(name)
                self._marks.unseal(name)

    # --- backwards ----------------------------------------------------------------------------------------

    def begin_graph(self, number: int, *, accumulates: bool) -> None:
        """Note that a graph's backward begins, as a part of the backward with this number.

        Raises: FcdpError as `settle` does.
        """
        if number not in self._under_way:
            self._note_failures()
            if not self._under_way:
                self.settle()
            backward = _Backward()
            self._under_way[number] = weakref.ref(backward)
            at_end_of_backward(partial(self._end_backward, number, backward))
        self._synchronises |= not accumulates

    def _end_backward(self, number: int, backward: _Backward) -> None:
        """Note that a backward has ended: autograd has added all gradients to their `.grad`s.

        Raises: FcdpError if it has not.
        """
        del self._under_way[number]
        if self._under_way:  # it was nested in another
            return
        synchronises, self._synchronises = self._synchronises, False
        if ignored := [n for n, g in self._touched.items() if g.is_still(self._marks.grad(n))]:
            self._lose_touched()
            raise FcdpError(
                f"this backward did not add to the .grad of parameter {ignored[0]!r} (one of "
                f"{len(ignored)}), for which gradients of micro-batches accumulate; within no_sync, and "
                "until they are synchronised, use loss.backward() without inputs=…, not torch.autograd.grad"
            )
        if synchronises:
            self._synchronise_rest()
        self._marks.drop(self._touched)
        self._touched.clear()
        self._marks.expect(n for params in self._waiting for n in params)

    def _note_failures(self) -> None:
        """Lose the gradients that failed backwards touched."""
        ended = [number for number, backward in self._under_way.items() if backward() is None]
        for number in ended:
            del self._under_way[number]
        if ended and not self._under_way:
            self._lose_touched()

    def _lose_touched(self) -> None:
        self._marks.lose(self._touched)
        self._touched.clear()
        self._synchronises = False

    def synchronise(self) -> None:
        """Reduce the gradients that wait, outside of a backward; all ranks must call it.

        Raises: PlanMismatchError on every rank if a rank does something else, FcdpError as `settle` does.
        """
        same_act(self._collectives, "synchronises the gradients that wait")
        self.settle()
        self._synchronise_rest()

    def _synchronise_rest(self) -> None:
        """Reduce the gradients that still wait and add them to `.grad`."""
        for params, waiting in list(self._waiting.items()):
            del self._waiting[params]
            self._marks.drop(params)
            bucket = waiting.bucket
            self._counters.add(Kind.COLLECT, waiting.slab_bytes)
            dtype = getattr(torch, bucket.bucket.reduce_dtype)
            rest = Pending(waiting.kept.to(self._collectives.device, dtype))
            slot = bucket.reduced(bucket.reductions[1], rest, params).wait()
            for name, shard in zip(params, bucket.grad_shards(slot, params), strict=True):
                if (grad := self._marks.shard(name)) is not None:
                    spec = self._records[name].spec
                    grad.add_(self._transport.home_transfers.grad_to_home(spec, shard))

    # --- what waits ---------------------------------------------------------------------------------------

    def concerns(self) -> list[str]:
        """The parameters with gradients that wait or were lost, in an order that all ranks share."""
        self._note_failures()
        return self._marks.names()

    def waits_for(self, buckets: Iterable[BoundBucket]) -> bool:
        """Whether gradients of any of these buckets wait."""
        caches = [bucket.cache for bucket in buckets]  # one for all plans that have the bucket
        return any(w.bucket.cache in caches for w in self._waiting.values())

    def settle(self) -> list[str]:
        """Forget waiting gradients whose `.grad` was cleared (`cleared`); return the other parameters.

        All ranks must call it; all get the same result.

        Raises: FcdpError if a gradient was changed while others of its parameter wait, or if a backward
        failed that had touched waiting gradients.
        """
        if not (names := self.concerns()):
            return []
        cleared = self._marks.cleared(self._collectives)
        self._marks.drop(cleared)
        marked = set(self._marks.names())
        for params, waiting in list(self._waiting.items()):
            if marked.isdisjoint(params):
                del self._waiting[params]
            elif not cleared.isdisjoint(params):
                self._zero(waiting, params, cleared)
        return [n for n in names if n not in cleared]

    def _zero(self, waiting: _Waiting, params: _Params, names: Collection[str]) -> None:
        slots = {p.name: p.layout.slot_elements for p in waiting.bucket.bucket.params}
        if waiting.slab is not None:
            self._lanes.device.synchronize()  # the Python thread writes next, not a stream
        row, kept = sum(slots[n] for n in params), waiting.kept
        rows = kept[: kept.numel() // row * row].view(-1, row)  # the rest is padding
        offset = 0
        for name in params:
            if name in names:
                rows.narrow(1, offset, slots[name]).zero_()
            offset += slots[name]
