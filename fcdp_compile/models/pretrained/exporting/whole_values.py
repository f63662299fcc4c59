"""Whole parameters, one at a time: on one rank's host, to be written to files, or on devices, to be sent on.

    home shards [W/G] on G ranks ── point to point ──▶ the writer [W]; other ranks hold only their own shards
    home shards or node shards   ── all-gather ──────▶ every rank [W], which only ranks that ask keep

The writer is the first rank of node 0.  To the writer, shards travel through host memory: an all-gather
on the device would need room for the largest parameter on every GPU, and training may have filled them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.core.params.inner_cut import whole_of
from fcdp_compile.core.params.mesh import Topology, everyone_ranks
from fcdp_compile.core.params.packing import put_boxes
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.ranks.lost_ranks import naming_lost_ranks
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.record import ParamRecord

HOST = torch.device("cpu")
_DOING = "whole parameters on their way to the rank that writes them"


class WholeValues:
    """Brings whole parameters to the writer.

    [Note: no early way out] If a rank fails, it remembers its error (`error`) and goes on sending and
    receiving, if need be zeros, because the other ranks wait for its messages.  From time to time all ranks
    exchange their errors (`together`); after an error, everything that was written is thrown away.

    Uses the group of all ranks, on the Python thread.

    keeps: whether this rank gets the values, which are on `device`.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._ranks = everyone_ranks(topology)
        self._here = (topology.node, topology.place, topology.number % topology.sharers)
        self.keeps = topology.number == 0
        self.device = HOST
        self.error: Exception | None = None

    def attempt(self, act: Callable[[], None]) -> None:
        """Call `act`, unless this rank has failed before ([Note: no early way out])."""
        if self.error is None:
            try:
                act()
            except Exception as error:  # any error must reach all ranks
                self.error = error

    def check(self) -> None:
        """Raise the error that this rank has remembered; for `together`."""
        if self.error is not None:
            raise self.error

    def whole(self, record: ParamRecord) -> Tensor | None:
        """Return a parameter in its home dtype on the writer's CPU, else None; all ranks must call it.

        Shapes: this rank's part `spec.local_shape`, the result `spec.whole_shape`.
        """
        spec, owners = record.spec, _owners(record.spec)
        if not self.keeps:
            # If every rank, or every node, has a copy of its own, the writer needs no other copy.
            if self._here in owners:
                self._send(self._part(record))
            return None
        room: list[Tensor] = []
        dtype = spec.home_dtype
        self.attempt(lambda: room.append(torch.empty(spec.whole_shape, dtype=dtype, device="cpu")))
        for owner in owners:
            self._put(record, owner, room)
        return room[0] if room else None

    def _put(
        self, record: ParamRecord, owner: tuple[int, int, int], room: Iterable[Tensor]
    ) -> None:
        """Put one rank's home shard into the whole parameter, if there is room for it."""
        spec = record.spec
        if owner == self._here:
            part = self._part(record)
        else:
            node, place, index = owner
            shape = spec.part_layout(index).local_shape(node, place)
            part = torch.empty(shape, dtype=spec.home_dtype, device="cpu")
            self._receive(part, self._ranks[owner])
        for whole in room:
            put_boxes(part, whole, spec.boxes(*owner))

    def _part(self, record: ParamRecord) -> Tensor:
        parts: list[Tensor] = []
        self.attempt(lambda: parts.append(record.peek().cpu()))
        spec = record.spec
        return (
            parts[0]
            if parts
            else torch.zeros(spec.local_shape, dtype=spec.home_dtype, device="cpu")
        )

    def _send(self, part: Tensor) -> None:
        if part.numel():
            everyone = self._topology.everyone
            with naming_lost_ranks(everyone, _DOING):
                dist.send(_bytes(part.contiguous()), group=everyone, group_dst=self._ranks[0, 0, 0])

    def _receive(self, part: Tensor, rank: int) -> None:
        if part.numel():
            everyone = self._topology.everyone
            with naming_lost_ranks(everyone, _DOING):
                dist.recv(_bytes(part), group=everyone, group_src=rank)


class GatheredValues(WholeValues):
    """Brings whole parameters to the device of every rank that asks.

    A parameter crosses between nodes only if the cache has no valid copy of it.  Uses the lanes' groups.
    """

    def __init__(self, state: ShardedModel, *, keeps: bool) -> None:
        super().__init__(state.topology)
        self._state = state
        self.keeps = keeps
        self.device = state.device.torch

    def whole(self, record: ParamRecord) -> Tensor | None:
        """Return a parameter in its home dtype, in new memory, on ranks that ask; all ranks must call it.

        Raises: PlanMismatchError on every rank if ranks are about to do different things.
        """
        spec, shard = record.spec, record.peek().to(self.device)
        part = self._state.outside.read(spec.key, shard, spec.home_dtype)
        with naming_lost_ranks(self._topology.everyone, _DOING):
            found = whole_of(part, spec.inner, self._topology.tp)
        return found if self.keeps else None


def _owners(spec: ParamSpec) -> list[tuple[int, int, int]]:
    """The node, place and number in the "tp" group of the ranks whose home shards make a parameter, once."""
    layout, inner = spec.layout, spec.inner
    sharers = 1 if inner is None or inner.dim is None else inner.ranks
    nodes, places = (1, 1) if layout.dim is None else (layout.nodes, layout.ranks_per_node)
    return list(itertools.product(range(nodes), range(places), range(sharers)))


def _bytes(tensor: Tensor) -> Tensor:
    # Gloo knows few dtypes.
    return tensor.view(-1).view(torch.uint8)
