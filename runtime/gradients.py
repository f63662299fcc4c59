"""Gradients of micro-batches that wait for the one that synchronises, as within `fcdp_compile.no_sync`.

    accumulating backward   pack [G*S] -> reduced within the node [N*S] -> + what waits -> waits
    collecting backward     pack [G*S] -> reduced within the node [N*S] -> + what waits -> inter -> .grad

Sums are in fp32 or wider, on the device or in host memory (`Bucket.gradient_tier`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.plan import LANES, Bucket, Kind, Tier
from fcdp_compile.runtime.cleared import GradientMarks
from fcdp_compile.runtime.counters import Counters
from fcdp_compile.runtime.lanes import Lanes, range_name, tensor_of
from fcdp_compile.runtime.pending import Pending
from fcdp_compile.runtime.pinned import PinnedPool
from fcdp_compile.runtime.record import ParamRecord

_Params = tuple[str, ...]
"""Names of parameters that one graph reduces together: some or all of a bucket's, in its order."""


@dataclass(slots=True)
class _Waiting:
    """kept: the sum so far, rows of slots of the parameters.  slab: the same if it is on the host."""

    kept: Pending
    bucket: Bucket
    slab: Tensor | None


class Accumulation:
    """What accumulates of one model on this rank.

    is_on: whether forwards that begin now accumulate in their backward.
    """

    def __init__(
        self,
        records: Mapping[str, ParamRecord],
        counters: Counters,
        pool: PinnedPool,
        lanes: Lanes,
    ) -> None:
        self.is_on = False
        self._counters = counters
        self._pool = pool
        self._lanes = lanes
        self._marks = GradientMarks(records)
        self._waiting: dict[_Params, _Waiting] = {}
        self._slabs: dict[_Params, Tensor] = {}  # never given back between steps
        self._moving: set[str] = set()  # of what a graph that runs has taken up
        self._backward = -1

    # --- steps of a graph ---------------------------------------------------------------------------------

    def collect(
        self, bucket: Bucket, params: _Params, grads: Tensor | Pending, dtype: torch.dtype
    ) -> Pending:
        """`grads` [n] and what waits, which then waits no longer; in `dtype`."""
        own, waiting = tensor_of(grads), self._waiting.pop(params, None)
        self._counters.add(Kind.COLLECT, _slab_bytes(waiting))
        if waiting is not None:
            self._moving.update(params)
        elif own.dtype == dtype:
            return grads if isinstance(grads, Pending) else Pending(grads)
        out = own.new_empty(own.shape, dtype=dtype)
        kept = None if waiting is None else waiting.kept
        total = own if kept is None else kept.tensor
        if waiting is not None and waiting.slab is not None:
            total = torch.empty_like(waiting.slab, device=own.device)
        elif kept is not None and total.dtype == dtype:
            out = total

        def run() -> None:
            if kept is not None:
                if total is not kept.tensor:
                    total.copy_(kept.tensor, non_blocking=True)
                total.add_(own)
            if out is not total:
                out.copy_(total)

        reads = [grads, total] if kept is None else [grads, total, kept]
        name = range_name(Kind.COLLECT, bucket)
        return self._lanes.start(LANES[Kind.COLLECT], run, out=out, reads=reads, name=name)

    def accumulate(self, bucket: Bucket, params: _Params, total: Tensor | Pending) -> Pending:
        """Let the sum [n] wait, which this backward adds to no `.grad`."""
        own = tensor_of(total)
        self._marks.set(params)
        self._moving.difference_update(params)
        if bucket.gradient_tier is not Tier.HOST:
            self._counters.add(Kind.ACCUMULATE, 0)
            done = total.done if isinstance(total, Pending) else None
            # What no lane has made may be the gradient itself, which others may have as well.
            kept = Pending(own if done is not None else own.clone(), done=done)
            self._waiting[params] = _Waiting(kept, bucket, None)
            return Pending(kept.tensor, done=done)
        if params not in self._slabs:
            self._slabs[params] = self._pool.take(own.numel(), own.dtype)
        slab = self._slabs[params]
        self._counters.add(Kind.ACCUMULATE, own.nbytes)
        stored = self._lanes.start(
            LANES[Kind.ACCUMULATE],
            lambda: slab.copy_(own, non_blocking=True),
            out=slab,
            reads=[total],
            name=range_name(Kind.ACCUMULATE, bucket),
        )
        self._waiting[params] = _Waiting(Pending(slab, done=stored.done), bucket, slab)
        return stored

    # --- what waits ---------------------------------------------------------------------------------------

    def waits_for(self, bucket_ids: Collection[int]) -> bool:
        """Whether gradients of any of these buckets wait."""
        return any(w.bucket.id in bucket_ids for w in self._waiting.values())

    def begin_backward(self, number: int) -> None:
        """A graph's backward begins, as a part of the backward with that number.

        Raises: FcdpError if a gradient was changed while others of its parameter wait.
        """
        if number != self._backward:
            self._backward = number
            self.settle()

    def end_graph(self) -> None:
        """A graph's backward has run to its end."""
        self._marks.drop(self._moving)
        self._moving.clear()

    def settle(self) -> list[str]:
        """Forget what waits for cleared gradients (`cleared`); returns the parameters of what is left.

        Raises: FcdpError if a gradient was changed while others of its parameter wait, or if a backward
        failed that had taken up what waited.
        """
        if not self._waiting and not self._moving:
            return []
        cleared = set(self._marks.cleared())
        self._marks.drop(cleared)
        self._moving -= cleared
        if self._moving:
            raise FcdpError(
                f"a backward failed when it had taken up the gradients of parameter {min(self._moving)!r} "
                "that earlier micro-batches left; clear all gradients (optimizer.zero_grad()) and begin "
                "again with the first micro-batch"
            )
        for params, waiting in list(self._waiting.items()):
            if cleared.issuperset(params):
                del self._waiting[params]
            elif not cleared.isdisjoint(params):
                _zero(waiting, params, cleared)
        return [n for params in self._waiting for n in params if n not in cleared]


def _slab_bytes(waiting: _Waiting | None) -> int:
    return 0 if waiting is None or waiting.slab is None else waiting.slab.nbytes


def _zero(waiting: _Waiting, params: _Params, names: Collection[str]) -> None:
    slots = {p.name: p.layout.slot_elements for p in waiting.bucket.params}
    if waiting.kept.done is not None:
        waiting.kept.done.order()
        if waiting.slab is not None and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # what follows is done by the Python thread
    row = sum(slots[n] for n in params)
    kept = waiting.kept.tensor
    rows = kept[: kept.numel() // row * row].view(-1, row)  # what is behind is padding
    offset = 0
    for name in params:
        if name in names:
            rows.narrow(1, offset, slots[name]).zero_()
        offset += slots[name]
