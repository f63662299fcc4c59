"""Whole parameters, one at a time: on one rank's host, to be written to files, or on devices, to be sent on.

    home shards [W/G] on G ranks ── point to point ──▶ the writer [W]; other ranks hold only their own shards
    home shards or node shards   ── all-gather ──────▶ every rank [W], which only ranks that ask keep

The writer is the rank at place 0 of node 0.  To the writer, shards travel through host memory: an all-gather
on the device would need room for the largest parameter on every GPU, and training may have filled them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fcdp_compile.params.layout import ParamLayout
from fcdp_compile.params.mesh import Topology, control_ranks
from fcdp_compile.ranks.lost_ranks import naming_lost_ranks
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.record import ParamRecord

HOST = torch.device("cpu")
_DOING = "whole parameters on their way to the rank that writes them"


class WholeValues:
    """Brings whole parameters to the writer.

    [Note: no early way out] If a rank fails, it remembers its error (`error`) and goes on sending and
    receiving, if need be zeros, because the other ranks wait for its messages.  From time to time all ranks
    exchange their errors (`together`); after an error, everything that was written is thrown away.

    Uses the control group, on the Python thread.

    keeps: whether this rank gets the values, which are on `device`.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._ranks = control_ranks(topology)
        self.keeps = topology.node == 0 and topology.place == 0
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

        Shapes: this rank's part `spec.local_shape`, the result `spec.layout.shape`.
        """
        layout = record.spec.layout
        owners = [(n, p) for n in range(layout.nodes) for p in range(layout.ranks_per_node)]
        here = (self._topology.node, self._topology.place)
        if not self.keeps:
            # If every rank, or every node, has a copy of its own, the writer needs no other copy.
            if layout.dim is not None and here in owners:
                self._send(self._part(record))
            return None
        room: list[Tensor] = []
        dtype = record.spec.home_dtype
        self.attempt(lambda: room.append(torch.empty(layout.shape, dtype=dtype, device="cpu")))
        for owner in owners if layout.dim is not None else [here]:
            shape = layout.local_shape(*owner)
            into = (
                _rows(room[0], layout, *owner)
                if room
                else torch.empty(shape, dtype=record.spec.home_dtype, device="cpu")
            )
            if owner == here:
                into.copy_(self._part(record))
            else:
                self._receive(into, self._ranks[owner])
        return room[0] if room else None

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
            with naming_lost_ranks(self._topology.control, _DOING):
                dist.send(
                    _bytes(part.contiguous()),
                    group=self._topology.control,
                    group_dst=self._ranks[0, 0],
                )

    def _receive(self, into: Tensor, rank: int) -> None:
        if not into.numel():
            return
        part = into
        if not into.is_contiguous():
            part = torch.empty(into.shape, dtype=into.dtype, device="cpu")
        with naming_lost_ranks(self._topology.control, _DOING):
            dist.recv(_bytes(part), group=self._topology.control, group_src=rank)
        if part is not into:
            into.copy_(part)


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
        found = self._state.outside.read(spec.key, shard, spec.home_dtype)
        return found if self.keeps else None


def _rows(whole: Tensor, layout: ParamLayout, node: int, place: int) -> Tensor:
    """Return the part of a whole parameter that the rank at this node and place owns."""
    if layout.dim is None:
        return whole
    rows = layout.local_shape(node, place)[layout.dim]
    return whole.narrow(layout.dim, layout.local_start(node, place), rows)


def _bytes(tensor: Tensor) -> Tensor:
    # Gloo knows few dtypes.
    return tensor.view(-1).view(torch.uint8)
