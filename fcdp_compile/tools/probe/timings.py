"""The timings of `fcdp probe`: the transfers, collectives and arithmetic of a training step, one by one.

They use the same lanes, groups and pinned memory as training; every rank calls all methods in the same order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fcdp_compile.cluster.free_memory import detect
from fcdp_compile.cluster.link_fit import Timed
from fcdp_compile.core.params.mesh import Topology
from fcdp_compile.core.ranks.messages import together
from fcdp_compile.devices import Device, StreamDevice
from fcdp_compile.plan import Kind, Lane
from fcdp_compile.runtime.cache.pinned import PinnedPool
from fcdp_compile.runtime.collectives.collectives import Collectives, are_blocking
from fcdp_compile.runtime.collectives.counters import Counters
from fcdp_compile.runtime.lanes.lanes import Lanes
from fcdp_compile.runtime.lanes.tasks import Pending
from fcdp_compile.tools.probe.stopwatch import Run, Stopwatch

T = TypeVar("T")

_NAME = "fcdp::probe"
_MOST_COPIES = 64  # loads beside one gather
_PART_OF_FREE = 16
"""Each of three gathers under way needs up to twice the memory that it sends; other work needs some too."""

_ON_A_CARD, _ON_THE_HOST = (8192, 4096, 16384), (256, 512, 2048)
"""Tokens, width and four times the width: the first half of a feed-forward layer; it takes milliseconds."""


class Arithmetic(NamedTuple):
    """A number of floating point operations, and their time."""

    flops: int
    seconds: float


class Probing:
    """The operations that can be timed on this rank."""

    def __init__(self, topology: Topology, device: Device) -> None:
        self._topology = topology
        self.device = device
        self._lanes = Lanes.shared(topology, device, is_blocking=are_blocking(topology, device))
        self._pool = PinnedPool(device)
        self.collectives = Collectives(topology, Counters(), self._lanes)
        self._watch = Stopwatch(self.collectives, device)
        self.ranks_on_device = ranks_on_device(self.collectives, device)

    def room_bytes(self) -> int:
        """The largest size for which all ranks have memory."""
        local = ranks_on_machine(self._topology)
        free = detect(ranks_on_machine=local, ranks_in_group=local).bytes
        if (on_device := self.device.free_bytes()) is not None:
            free = min(free, on_device // self.ranks_on_device)
        rows = self.collectives.agree([free // _PART_OF_FREE])
        return min(row[0] for row in rows)

    def gathers(self, kind: Kind, sizes: Sequence[int], *, budget_s: float) -> list[Timed]:
        """Times of all-gathers between or within all nodes at once; bytes: those that one rank sends."""
        others = self.collectives.group_size(kind) - 1

        def make(size: int) -> tuple[int, Run]:
            part = self._filled(-(-size // others))
            return others * part.nbytes, partial(self._gather, kind, part)

        return self._sweep(make, sizes, budget_s)

    def loads(self, sizes: Sequence[int], *, budget_s: float) -> list[Timed]:
        """Times of copies from pinned memory to the device, all ranks copying at once; one for each size."""

        def make(size: int) -> tuple[int, Run]:
            return size, partial(self._load, self._slab(size))

        return self._sweep(make, sizes, budget_s)

    def stores(self, sizes: Sequence[int], *, budget_s: float) -> list[Timed]:
        """Times of copies from the device to pinned memory, all ranks copying at once; one for each size."""

        def make(size: int) -> tuple[int, Run]:
            slab, source = self._slab(size), self._filled(size)
            return size, partial(self._copy, Lane.D2H, slab, source)

        return self._sweep(make, sizes, budget_s)

    def load_alone_s(self, size: int, *, budget_s: float) -> float:
        """Seconds for a load on one rank of each node while the others load nothing."""
        slab = self._together(partial(self._slab, size))
        run: Run = partial(self._load, slab) if self._topology.place == 0 else lambda: None
        return self._watch.median_s(run, budget_s=budget_s)

    def gather_slowdown(self, gather: Timed, load: Timed) -> float:
        """The factor by which a gather within the node takes longer while all ranks load.

        gather, load: the size of each, and its time alone.
        """
        kind = Kind.INTRA_ALL_GATHER
        size = gather.bytes // (self.collectives.group_size(kind) - 1)
        part = self._together(partial(self._filled, size))
        slab = self._together(partial(self._slab, load.bytes))
        arrived = self._together(partial(torch.empty_like, slab, device=self.device.torch))
        count = min(_MOST_COPIES, math.ceil(2 * gather.seconds / load.seconds))

        def start() -> list[Pending]:
            return [self._copy(Lane.H2D, arrived, slab) for _ in range(count)]

        def run() -> None:
            self._gather(kind, part).wait()

        return self._watch.median_beside_s(run, start) / self._watch.median_beside_s(run, list)

    def copy(self, size: int, *, budget_s: float) -> Timed:
        """The time of a copy on the device; its bytes are twice its size, as it reads and writes."""
        source = self._together(partial(self._filled, size))
        copy = self._together(partial(torch.empty_like, source))

        def run() -> None:
            copy.copy_(source)

        return Timed(2 * size, self._watch.median_s(run, budget_s=budget_s))

    def matmul(self, *, budget_s: float) -> Arithmetic:
        """The time of a product of matrices as in a transformer, in bf16 on a GPU, else in fp32."""
        is_card = isinstance(self.device, StreamDevice)
        dtype = torch.bfloat16 if is_card else torch.float32
        tokens, width, inner = _ON_A_CARD if is_card else _ON_THE_HOST

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.ones(rows, columns, dtype=dtype, device=self.device.torch)

        a = self._together(partial(matrix, tokens, width))
        b = self._together(partial(matrix, width, inner))
        product = self._together(partial(matrix, tokens, inner))

        def run() -> None:
            torch.mm(a, b, out=product)

        return Arithmetic(
            flops=2 * tokens * width * inner, seconds=self._watch.median_s(run, budget_s=budget_s)
        )

    def _sweep(
        self, make: Callable[[int], tuple[int, Run]], sizes: Sequence[int], budget_s: float
    ) -> list[Timed]:
        return self._watch.sweep(
            lambda size: self._together(partial(make, size)), sizes, budget_s=budget_s
        )

    def _together(self, make: Callable[[], T]) -> T:
        """Return the result of `make`; if a rank lacks memory for it, all ranks raise before a collective."""
        made: list[T] = []
        together(self._topology.control, lambda: made.append(make()))
        return made[0]

    def _gather(self, kind: Kind, part: Tensor) -> Pending:
        return self.collectives.all_gather(kind, part, _NAME)

    def _load(self, slab: Tensor) -> Pending:
        # The buffer is new each time, as in training: on a CPU its allocation is part of a load's time.
        arrived = torch.empty_like(slab, device=self.device.torch)
        return self._copy(Lane.H2D, arrived, slab)

    def _copy(self, lane: Lane, out: Tensor, source: Tensor) -> Pending:
        run = partial(out.copy_, source, non_blocking=True)
        return self._lanes.start(lane, run, out=out, reads=[source], name=_NAME)

    def _slab(self, size: int) -> Tensor:
        # Filled, because memory that was never written reads from a single page of zeros.
        return self._pool.take(size, torch.uint8).fill_(1)

    def _filled(self, size: int) -> Tensor:
        return torch.ones(size, dtype=torch.uint8, device=self.device.torch)


def ranks_on_machine(topology: Topology) -> int:
    """How many ranks run on this machine; a machine may be several nodes, and a node several machines."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", topology.ranks_per_node))


def ranks_on_device(collectives: Collectives, device: Device) -> int:
    """How many ranks share this rank's GPU.

    The number of visible GPUs does not tell: each rank may see only one of them (CUDA_VISIBLE_DEVICES).
    """
    if (mine := device.identity()) is None:
        return 1
    return collectives.exchange_texts(mine).count(mine)
