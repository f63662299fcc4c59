"""This rank's memory of the tensors of a sharded model, to be filled in place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fcdp_compile.params.layout import Box
from fcdp_compile.pretrained.match import Assignment, Held
from fcdp_compile.pretrained.quantising import QuantisedPart
from fcdp_compile.pretrained.rows import CheckpointRows
from fcdp_compile.pretrained.source import Files, Source, fill_boxes
from fcdp_compile.quantised.weight import QuantisedWeight
from fcdp_compile.runtime.model import ShardedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """This rank's part of a tensor: its own memory, and the blocks of the whole tensor that the part is.

    For the home shard of a [V, d] parameter cut along V: values [V/G, d], one block at (its first row, 0).
    """

    values: Tensor
    boxes: list[Box]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.values.nbytes

    def fill(self, source: Source, files: Files) -> None:
        """Read the part."""
        fill_boxes(self.values, self.boxes, source, files)

    def gather(self) -> dict[str, Tensor]:
        """Nothing is needed of other ranks; see `QuantisedPart`."""
        return {}

    def finish(self, whole: dict[str, Tensor]) -> None:
        """Nothing is left to do; see `QuantisedPart`."""


class Destinations:
    """The tensors of one model: home shards of parameters, and buffers and ignored parameters, whole."""

    def __init__(self, root: nn.Module, state: ShardedModel) -> None:
        self._state = state
        self._records = state.records.by_parameter()
        self._buffer_names = {id(b): name for name, b in root.named_buffers()}
        self._parts: dict[int, Part | QuantisedPart] = {}

    def is_unset(self, held: Held) -> bool:
        """Whether a tensor has no values yet."""
        record = self._records.get(id(held.tensor))
        return record.spec.key in self._state.unset.keys if record else held.tensor.is_meta

    def part(self, held: Held) -> Part | QuantisedPart:
        """Return this rank's part; a buffer on meta gets memory, which `arrived` puts into the model."""
        if id(held.tensor) not in self._parts:
            self._parts[id(held.tensor)] = self._part(held)
        return self._parts[id(held.tensor)]

    def _part(self, held: Held) -> Part | QuantisedPart:
        if held.weight is not None:
            return self._quantised_part(held.weight, held.tensor.dtype)
        record = self._records.get(id(held.tensor))
        if record is None:
            whole = held.tensor.detach()
            if whole.is_meta:
                whole = torch.empty_like(whole, device=self._state.device.torch)
            first = (0,) * whole.ndim
            return Part(values=whole, boxes=[Box(first, first, tuple(whole.shape))])
        home = self._state.topology.home(record.spec.strategy.home)
        return Part(values=record.to_fill(), boxes=record.spec.boxes(home.node, home.place))

    def _quantised_part(self, weight: QuantisedWeight, dtype: torch.dtype) -> QuantisedPart:
        packed = {name: self._records[id(p)] for name, p in weight.named_parameters()}
        return QuantisedPart(weight, dtype, packed, self._state)

    def rows(self, assignments: Iterable[Assignment]) -> CheckpointRows:
        """Return the checkpoint's rows, from which other ranks' home shards can be read as well."""
        return CheckpointRows(
            {
                record.spec.key: (record.spec, assignment.source)
                for assignment in assignments
                if (record := self._records.get(id(assignment.held.tensor))) is not None
            }
        )

    def arrived(self, filled: Iterable[Held]) -> None:
        """Mark tensors as filled: they are no longer unset, and gathered copies of them are stale."""
        keys, buffers = [], []
        for held in filled:
            part = self.part(held)
            if isinstance(part, QuantisedPart):
                keys += part.keys
                buffers += [self._buffer_names[id(b)] for b in part.replaced]
            elif (record := self._records.get(id(held.tensor))) is not None:
                keys.append(record.spec.key)
            elif held.tensor.is_meta:
                buffers.append(self._buffer_names[id(held.tensor)])
                for entry in held.entries:
                    entry.module._buffers[entry.leaf] = part.values
        self._state.validity.values_arrived(keys, buffers)
