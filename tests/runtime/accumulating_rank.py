"""A rank that accumulates gradients in real backwards of autograd; stand-ins take the other ranks' part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from builders_plan import make_bucket, make_placement
from fcdp_compile.core.params.packing import unpack_grads
from fcdp_compile.devices import Cpu
from fcdp_compile.plan import Bucket, Kind, Tier
from fcdp_compile.runtime.buckets.bound_bucket import BoundBucket
from fcdp_compile.runtime.buckets.bucket_cache import BucketCache
from fcdp_compile.runtime.cache.home_transfers import HomeTransfers
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.agreement import packed, unpacked
from fcdp_compile.runtime.collectives.collectives import Telling
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes, tensor_of
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.runtime.optimizers.gradients import Accumulation
from fcdp_compile.runtime.parameters.record import Generations
from fcdp_compile.torch_compat.autograd import backward_number

CPU = torch.device("cpu")
NODE = 1  # of two nodes with two ranks each; this rank is at place 0 and has no element of `tiny`

BUCKET = make_bucket(0, [("w", (8, 2)), ("tiny", (2,)), ("s", ())])
OTHER = make_bucket(1, [("v", (4,))])
SLOTS = {"w": 4, "tiny": 1, "s": 1}
NAMES = tuple(SLOTS)
HELD_BYTES = 2 * sum(SLOTS.values()) * 4


class Peers:
    """The other ranks: they send what this rank sends; a test sets their flags about gradients."""

    def __init__(self) -> None:
        self.agreed = 0
        self.node = NODE
        self.device = torch.device("cpu")
        self.say: Callable[[list[bool]], list[bool]] = list

    def tell(self, words: list[int], what: str) -> Telling:
        self.agreed += 1
        count = 2 * len(NAMES)
        head, complement, *flags = words
        (said,) = packed(self.say(unpacked(flags, count)))
        return Telling([head, complement, flags[0] | said, *flags[1:]], None, str)

    def group_size(self, kind: Kind) -> int:
        return 2

    def reduction(
        self, kind: Kind, send: Pending, name: str, *, dtype: torch.dtype, codec: None, sizes: None
    ) -> Pending:
        assert kind is Kind.INTER_REDUCE_SCATTER
        return Pending(send.wait().view(2, -1)[NODE].clone())


@dataclass
class Record:
    """A parameter and its spec: the part of a ParamRecord that is used here."""

    spec: Any
    parameter: nn.Parameter

    def living(self) -> nn.Parameter:
        return self.parameter

    def local(self) -> Tensor:
        return self.parameter.detach()


class GradientsOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[], list[Tensor]], *params: Tensor) -> Tensor:
        ctx.run = run
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.run()


class Rank:
    """One rank with the parameters of two buckets."""

    def __init__(self, tier: Tier, *, reduces: tuple[str, int] = ("float32", 4)) -> None:
        change = {"reduce_dtype": reduces[0], "reduce_itemsize": reduces[1]}
        self.buckets = [replace(b, **change) for b in (BUCKET, OTHER)]
        self.records = {p.name: _record(p.layout, p.name) for b in self.buckets for p in b.params}
        self.counters, self.pool, self.peers = Counters(), PinnedPool(Cpu()), Peers()
        self.lanes = Lanes(Cpu(), is_blocking=True)
        transport: Any = SimpleNamespace(
            counters=self.counters,
            pool=self.pool,
            lanes=self.lanes,
            collectives=self.peers,
            home_transfers=HomeTransfers(self.counters, self.lanes, NODE),
            topology=SimpleNamespace(home=lambda scope: None),
        )
        records: Any = self.records
        self.accumulation = Accumulation(records, transport)
        self.bound = {
            b.id: BoundBucket(
                b,
                make_placement(b, gradient_tier=tier),
                [records[p.name] for p in b.params],
                BucketCache(b, transport),
                Generations([]),
                transport,
            )
            for b in self.buckets
        }

    def grad(self, name: str) -> Tensor | None:
        return self.records[name].parameter.grad

    def loss(
        self,
        value: float,
        *,
        accumulates: bool,
        bucket: int = 0,
        then: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """A loss whose gradients are `value` in every element; its backward calls `then` at its end."""
        chosen = self.buckets[bucket]
        params = [self.records[p.name].parameter for p in chosen.params]

        def run() -> list[Tensor]:
            grads = self._reduce(chosen, value, accumulates=accumulates)
            then()
            return grads

        return GradientsOf.apply(run, *params)

    def _reduce(self, bucket: Bucket, value: float, *, accumulates: bool) -> list[Tensor]:
        accumulation, reduced = self.accumulation, getattr(torch, bucket.reduce_dtype)
        bound = self.bound[bucket.id]
        accumulation.begin_graph(backward_number(), accumulates=accumulates)
        specs = [self.records[p.name].spec for p in bucket.params]
        names = tuple(p.name for p in bucket.params)
        own = torch.full((2 * bucket.slot_elements,), value, dtype=reduced)
        dtype = torch.float32 if accumulates else reduced
        total = accumulation.collect(bound, names, own, dtype)
        assert tensor_of(total).dtype is dtype
        if accumulates:
            accumulation.accumulate(bound, names, total).wait()
            return [torch.full(s.local_shape, -0.0) for s in specs]
        return unpack_grads(
            total.wait().view(2, -1)[NODE],
            [s.layout for s in specs],
            [s.local_shape for s in specs],
            [s.home_dtype for s in specs],
            NODE,
        )

    def accumulate(self, *values: float) -> None:
        for value in values:
            self.loss(value, accumulates=True).backward()

    def synchronise(self, value: float) -> None:
        self.loss(value, accumulates=False).backward()

    def check(self, expected: float | dict[str, float]) -> None:
        """Compare every element of every gradient."""
        for name in NAMES:
            grad = self.grad(name)
            value = expected if isinstance(expected, float | int) else expected[name]
            assert grad is not None
            assert torch.equal(grad, torch.full_like(grad, value)), (name, grad, value)

    def clear(self, *names: str, set_to_none: bool) -> None:
        for name in names:
            if set_to_none:
                self.records[name].parameter.grad = None
            elif (grad := self.grad(name)) is not None:
                grad.zero_()


def _record(layout: Any, name: str) -> Record:
    shape = layout.local_shape(NODE, 0)
    assert (name == "tiny") == (shape == (0,))
    spec = SimpleNamespace(
        key=name,
        name=name,
        layout=layout,
        local_shape=shape,
        home_dtype=torch.float32,
        computes_on=None,
    )
    return Record(spec=spec, parameter=nn.Parameter(torch.ones(shape)))
