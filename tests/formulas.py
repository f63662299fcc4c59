"""The bytes that a training step must move, from the layout's arithmetic alone; shares no code with fcdp.

N nodes, g ranks per node.  All numbers are bytes per rank: sent to others (inter, intra) or copied (store,
load).  A parameter is cut in g pieces, each in N chunks; every rank contributes a slot of the largest
chunk, so a bucket of slots with S elements of b bytes costs

    inter_all_gather      (N - 1) * S * b       intra_all_gather      (g - 1) * N * S * b
    inter_reduce_scatter  (N - 1) * S * b       intra_reduce_scatter  (g - 1) * N * S * b
    store, load                 N * S * b       where a host cache is used

    HO-Ring   intra_own_all_gather   (g - 1) * S * b   intra_rest_all_gather  (g - 1) * (N - 1) * S * b
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, prod
from mmap import PAGESIZE


@dataclass(frozen=True, kw_only=True)
class Point:
    """A strategy's choices.

    keeps: what a rank keeps of a gathered bucket: "full", "shard" (the node shard), "host" (the node shard,
    in host memory) or nothing.  resident: kept until the bucket changes, else until the backward.
    gradient: gradients accumulate whole ("n"), reduced within a node ("i"), or not at all ("g").
    home: the optimizer's shards are split over all ranks ("g"), the ranks of a node ("i"), or not ("n").
    """

    keeps: str
    resident: bool = True
    gradient: str = "g"
    home: str = "g"


POINTS = {
    "ddp": Point(keeps="", resident=False, gradient="n", home="n"),
    "mics": Point(keeps="", resident=False, gradient="i", home="i"),
    "paro-nni": Point(keeps="full", gradient="n", home="i"),
    "paro-nii": Point(keeps="full", gradient="i", home="i"),
    "paro-ini": Point(keeps="", resident=False, gradient="n", home="i"),
    "zero1": Point(keeps="full", gradient="n"),
    "zero2": Point(keeps="full"),
    "zero3": Point(keeps="", resident=False),
    "zero++": Point(keeps="shard", resident=False),
    "paro-nig": Point(keeps="full", gradient="i"),
    "paro-ing": Point(keeps="shard", gradient="n"),
    "paro-iig": Point(keeps="shard", gradient="i"),
    "paro-igg": Point(keeps="shard"),
    "paro-gng": Point(keeps="", resident=False, gradient="n"),
    "paro-gig": Point(keeps="", resident=False, gradient="i"),
    "fcdp": Point(keeps="host", gradient="i"),
}
"""By strategy."""

RESIDENT = [name for name, point in POINTS.items() if point.resident]
"""Strategies that keep gathered buckets until they change."""

Shape = Sequence[int]
Bucket = tuple[str, ...]

AGREE_WORDS = 32
"""Words of 8 bytes that every rank sends in each hop before a graph runs."""


@dataclass(frozen=True, kw_only=True)
class Moved:
    """Bytes, and numbers of messages or copies, by kind."""

    bytes: Mapping[str, int]
    calls: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as the formulas need it.

    shapes: of all parameters.  trainable: names.  backward: names of the parameters that the backward reads
    again, for derivatives with respect to activations, or of products with them.  buckets: names by bucket.
    """

    shapes: Mapping[str, Shape]
    trainable: frozenset[str]
    backward: frozenset[str]
    buckets: Sequence[Bucket]
    itemsize: int = 4


def slot_elements(shape: Shape, nodes: int, ranks_per_node: int) -> int:
    """Elements of the largest chunk if the dimension with the least padding is split."""
    if not shape:
        return 1
    sizes = []
    for dim, rows in enumerate(shape):
        others = prod(s for i, s in enumerate(shape) if i != dim)
        sizes.append(ceil(ceil(rows / ranks_per_node) / nodes) * others)
    return min(sizes)


_FROZEN = "frozen"
_SENT = {"w8": "weights", "c8": "weights", "c4": _FROZEN, "g8": "gradients", "g4": "gradients"}
_CODES = {"8": (8, 256, 4), "4": (4, 64, 2), "c4": (4, 64, 2)}
"""Bits of a value, values of a block, bytes of its scale; by modifier, or its last letter."""

Code = tuple[int, int, int]


def _code(modifier: str) -> Code:
    return _CODES.get(modifier) or _CODES[modifier[-1]]


def _encoded(slots: Sequence[int], code: Code) -> int:
    """Bytes of quantised values and their scales: one scale for each block of a parameter."""
    bits, block, scale = code
    return scale * sum(ceil(n / block) for n in slots) + ceil(sum(slots) * bits / 8)


def caches(strategy: str, nodes: int, ranks_per_node: int, *, is_frozen: bool = False) -> bool:
    """Whether the strategy keeps buckets for their next use: gathered, or frozen home shards on the host."""
    point = POINTS[strategy]
    if nodes > 1 and point.home == "g":
        return bool(point.keeps)
    leaves = is_frozen and point.keeps == "host"
    return ranks_per_node > 1 and (leaves or point.keeps == "full")


class _Tally:
    def __init__(
        self,
        model: Model,
        nodes: int,
        ranks_per_node: int,
        home: str,
        modifiers: Sequence[str] = (),
    ) -> None:
        self._model, self._home = model, home
        self._all_nodes, self._all_g = nodes, ranks_per_node
        self._nodes = nodes if home == "g" else 1
        self._g = 1 if home == "n" else ranks_per_node
        self._codes = {_SENT[m]: _code(m) for m in modifiers if m in _SENT}
        is_flat = self._nodes == 1 or self._g == 1
        self._is_ho_ring = "ho_ring" in modifiers and not is_flat
        self._on_host = {_SENT[m]: _code(m) for m in modifiers if m in ("c8", "c4")}
        self._bytes: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()

    def _slot(self, names: Iterable[str]) -> int:
        shapes = [self._model.shapes[n] for n in names]
        return sum(slot_elements(s, self._nodes, self._g) for s in shapes) * self._model.itemsize

    def _row(self, names: Bucket, codes: Mapping[str, Code], what: str = "weights") -> int:
        """Bytes of a slot, quantised if there is a code for it."""
        slots = [slot_elements(self._model.shapes[n], self._nodes, self._g) for n in names]
        code = codes.get(what)
        if what == "weights" and not set(names) & self._model.trainable:
            code = codes.get(_FROZEN, code)
        return _encoded(slots, code) if code else sum(slots) * self._model.itemsize

    def _add(self, kind: str, sent: int) -> None:
        self._bytes[kind] += sent
        self._calls[kind] += 1

    def gather(self, names: Bucket, *, then_kept: Callable[[], None] = int) -> None:
        """Gather home shards to full parameters, in one graph."""
        self.inter("all_gather", names)
        then_kept()
        if self._is_ho_ring:
            own = (self._g - 1) * self._slot(names)
            self._add("intra_own_all_gather", own)
            self._add("intra_rest_all_gather", own * (self._nodes - 1))
        else:
            self.intra("all_gather", names)

    def inter(self, kind: str, names: Bucket) -> None:
        if self._nodes > 1:
            what = "weights" if kind == "all_gather" else "gradients"
            row = self._row(names, self._codes, what)
            self._add(f"inter_{kind}", (self._nodes - 1) * row)

    def intra(self, kind: str, names: Bucket, *, is_there: bool = False) -> None:
        if self._g > 1:
            sent = (self._g - 1) * self._nodes * self._slot(names)
            self._add(f"intra_{kind}", 0 if is_there else sent)

    def copy(self, kind: str, names: Bucket, *, to_host: bool) -> None:
        self._add(kind, self._nodes * self._row(names, self._on_host) if to_host else 0)

    def reduce(
        self, bucket: Bucket, scope: str, number: int, *, is_last: bool, on_host: bool
    ) -> None:
        """Reduce the gradients of micro-batch `number`."""
        if scope == "i" and self._all_nodes == 1:
            scope = "g"
        waits = self._nodes * (self._g if scope == "n" else 1) * self._slot(bucket)
        part = self._within(bucket)
        if scope != "n":
            self._reduce_within(part)
        if scope != "g":
            self._add("collect", waits if on_host and number else 0)
            if not is_last:
                self._add("accumulate", waits if on_host else 0)
                return
        if scope == "n":
            self._reduce_within(part)
        if self._home == "g":
            self.inter("reduce_scatter", bucket)
        elif self._all_nodes > 1:
            between = ceil(part / self._model.itemsize / self._all_nodes) * self._model.itemsize
            self._add("inter_all_reduce", 2 * (self._all_nodes - 1) * between)
        if self._home == "n" and self._all_g > 1:
            self._add("intra_grad_all_gather", (self._all_g - 1) * part)

    def _within(self, bucket: Bucket) -> int:
        """Bytes of a rank's gradients after the reduction within its node."""
        if self._home != "n":
            return self._nodes * self._slot(bucket)
        itemsize = self._model.itemsize
        return ceil(self._slot(bucket) / itemsize / self._all_g) * itemsize

    def _reduce_within(self, part: int) -> None:
        if self._all_g > 1:
            self._add("intra_reduce_scatter", (self._all_g - 1) * part)

    def moved(self) -> Moved:
        return Moved(bytes={k: n for k, n in self._bytes.items() if n}, calls=dict(self._calls))


def node_bytes(model: Model, bucket: Bucket, nodes: int, ranks_per_node: int) -> int:
    """Bytes of a bucket's node shard in the cache of each rank."""
    slots = (slot_elements(model.shapes[n], nodes, ranks_per_node) for n in bucket)
    return nodes * sum(slots) * model.itemsize


def training_step(
    model: Model,
    strategy: str,
    nodes: int,
    ranks_per_node: int,
    *,
    first: bool,
    left_out: Collection[Bucket] = (),
    micro_batches: int = 1,
    gradients_on_host: bool = False,
) -> Moved:
    """Count a step's forwards and backwards after all trainable parameters changed.

    first: nothing is cached yet.  left_out: buckets without a place in the cache.
    gradients_on_host: whether gradients accumulate on the host, in fp32.
    """
    strategy, *modifiers = [strategy] if strategy in POINTS else strategy.split("+")
    point = POINTS[strategy]
    tally = _Tally(model, nodes, ranks_per_node, point.home, modifiers)
    on_host = point.keeps == "host"
    for number in range(micro_batches):
        for bucket in model.buckets:
            is_frozen = not set(bucket) & model.trainable
            is_kept = caches(strategy, nodes, ranks_per_node, is_frozen=is_frozen)
            is_kept &= bucket not in left_out
            again = tuple(n for n in bucket if n in model.backward)
            was_changed = number == 0 and (first or not is_frozen)
            resident = is_kept and point.resident
            before = resident and is_frozen  # stale buckets are gathered before the forward
            in_full = is_kept and point.keeps == "full"
            store = partial(tally.copy, "store", bucket, to_host=on_host)
            if before and was_changed:
                tally.inter("all_gather", bucket)
                store()
                if in_full:
                    tally.intra("all_gather", bucket)
            if resident and (before or not was_changed):
                tally.copy("load", bucket, to_host=on_host)
                tally.intra("all_gather", bucket, is_there=in_full)
            else:
                tally.gather(bucket, then_kept=store if is_kept and (again or resident) else int)
            if again and is_kept:
                tally.copy("load", bucket, to_host=on_host)
                tally.intra("all_gather", bucket, is_there=in_full)
            elif again:  # gathered between nodes again, but only the parameters needed
                tally.gather(again)
            if not is_frozen:
                is_last = number == micro_batches - 1
                scope = point.gradient if micro_batches > 1 else "g"
                tally.reduce(bucket, scope, number, is_last=is_last, on_host=gradients_on_host)
    return tally.moved()


def evaluation_batch(
    model: Model, strategy: str, nodes: int, ranks_per_node: int, *, first: bool
) -> Moved:
    """Count one forward without gradients after training; in the first, the trainable buckets are stale."""
    point = POINTS[strategy]
    tally = _Tally(model, nodes, ranks_per_node, point.home)
    for bucket in model.buckets:
        is_frozen = not set(bucket) & model.trainable
        resident = point.resident and caches(strategy, nodes, ranks_per_node, is_frozen=is_frozen)
        stale = first and not is_frozen
        if not resident or stale:
            tally.inter("all_gather", bucket)
        if resident:
            tally.copy("store" if stale else "load", bucket, to_host=point.keeps == "host")
        is_there = resident and point.keeps == "full" and not stale
        tally.intra("all_gather", bucket, is_there=is_there)
    return tally.moved()


def agreement_bytes(nodes: int, ranks_per_node: int, *, cached: bool) -> int:
    """Bytes that a rank sends to agree before a forward, and before a backward that gathers again."""
    words = AGREE_WORDS * (1 if cached else 2)
    return words * 8 if nodes * ranks_per_node > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one rank for an optimizer whose states wait in host memory, in buckets.

    The slabs of all buckets have whole pages; two buckets that follow each other are on the device at a time;
    every bucket crosses the bus once in each direction.  Steps on the host move gradients and parameters in
    the states' place, and keep both there beside the states.  Source: ZeRO-Offload (Ren et al., 2021),
    section 4, for steps on the host.

    host: of host memory or of files.  in_flight: the most of device memory at a time during a step.
    to_device, to_host: that cross the bus in a step in the steady state.
    """

    host: int
    in_flight: int
    to_device: int
    to_host: int


def state_bytes(buckets: Sequence[Sequence[int]], states: int) -> StateBytes:
    """The bytes of states that the device steps.

    buckets: for each bucket, the bytes of each home shard in the dtype of the states.  states: S.
    """
    sizes = [states * sum(map(_aligned, shards)) for shards in buckets]
    moved = [size for size in sizes if size]
    return StateBytes(
        host=sum(map(_in_pages, moved)),
        in_flight=max((a + b for a, b in pairwise([0, *moved])), default=0),
        to_device=sum(moved),
        to_host=sum(moved),
    )


def bytes_of_host_steps(buckets: Sequence[Sequence[int]], states: int) -> StateBytes:
    """The bytes of states that the host steps; gradients and states have the dtype of the parameters.

    buckets, states: as in `state_bytes`.
    """
    sizes = [(states + 2) * sum(map(_aligned, shards)) for shards in buckets]
    moved = sum(sum(shards) for shards in buckets)
    return StateBytes(
        host=sum(_in_pages(size) for size in sizes if size),
        in_flight=0,
        to_device=moved,
        to_host=moved,
    )


def _aligned(size_bytes: int) -> int:
    return ceil(size_bytes / 16) * 16


def _in_pages(size_bytes: int) -> int:
    return ceil(size_bytes / PAGESIZE) * PAGESIZE
