"""This rank's memory of the tensors of a sharded model, to be filled in place.

Blocks of a quantised weight are quantised while they are read from a checkpoint that is not quantised.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fcdp_compile.core.params.layout import Box
from fcdp_compile.models.pretrained.match import Held
from fcdp_compile.models.pretrained.source import CheckpointRows, Files, Source
from fcdp_compile.models.quantised.interface import Quantiser
from fcdp_compile.models.quantised.weight import QuantisedWeight
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.record import ParamRecord

_AT_ONCE = 2**18
"""Values that are quantised at a time."""


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
        source.fill_boxes(self.values, self.boxes, files)


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
            packed = {name: self._records[id(p)] for name, p in held.weight.named_parameters()}
            return QuantisedPart(held.weight, held.tensor.dtype, packed, self._state)
        record = self._records.get(id(held.tensor))
        if record is None:
            whole = held.tensor.detach()
            if whole.is_meta:
                whole = torch.empty_like(whole, device=self._state.device.torch)
            first = (0,) * whole.ndim
            return Part(values=whole, boxes=[Box(first, first, tuple(whole.shape))])
        home = self._state.topology.home(record.spec.strategy.home)
        return Part(values=record.to_fill(), boxes=record.spec.boxes(home.node, home.place))

    def rows(self, assigned: Iterable[Held]) -> CheckpointRows:
        """Return the checkpoint's rows, from which other ranks' home shards can be read as well."""
        return CheckpointRows(
            {
                record.spec.key: (record.spec, held.sources[0])
                for held in assigned
                if (record := self._records.get(id(held.tensor))) is not None
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


def quantised_in_pieces(
    quantiser: Quantiser, values: Tensor, *, at_once: int = _AT_ONCE
) -> dict[str, Tensor]:
    """Quantise some rows at a time, because libraries make copies in fp32 on the way."""
    width = quantiser.row_elements
    pieces = (values,) if width is None else values.split(max(width, at_once // width * width))
    made = [quantiser.quantise(piece) for piece in pieces]
    return {name: torch.cat([tensors[name] for tensors in made]) for name in made[0]}


class QuantisedPart:
    """This rank's part of a quantised weight.

    Peak memory: the rows of the checkpoint's tensor that this rank's blocks are in, and the packed tensors.
    dtype: of the values that are quantised.
    replaced: the buffers that `finish` has replaced.
    """

    def __init__(
        self,
        weight: QuantisedWeight,
        dtype: torch.dtype,
        packed: Mapping[str, ParamRecord],
        state: ShardedModel,
    ) -> None:
        self._recipe = weight.recipe.made_of(dtype)
        quantiser = self._recipe.quantiser
        assert quantiser is not None
        self._weight, self._packed, self._state = weight, packed, state
        self._quantiser: Quantiser = quantiser
        self._asked: dict[str, Tensor] = {}
        self.replaced: list[Tensor] = []

    @property
    def keys(self) -> list[str]:
        """The keys of the packed parameters."""
        return [record.spec.key for record in self._packed.values()]

    @property
    def nbytes(self) -> int:
        """Bytes of the packed parts."""
        return sum(record.peek().nbytes for record in self._packed.values())

    def fill(self, source: Source, files: Files) -> None:
        """Read the rows that this rank's blocks are in, and quantise the blocks."""
        first, count = self._rows()
        width = self._quantiser.row_elements
        if width is None:  # blocks end within rows: quantise all of it
            values = self._read(source, 0, self._quantiser.shape.numel(), files)
        else:
            values = self._read(source, first * width, (first + count) * width, files)
        made = quantised_in_pieces(self._quantiser, values) if values.numel() else {}
        for name, tensor in made.items():
            local = self._packed[name].to_fill()
            rows = tensor.reshape(-1, *local.shape[1:])
            if width is None:
                rows = rows.narrow(0, *self._rows(name))
            if name in self._quantiser.asked:
                self._asked[name] = rows.to(self._state.device.torch)
            else:
                local.copy_(rows.view(local.dtype) if rows.itemsize == 1 else rows)

    def gather(self) -> dict[str, Tensor]:
        """What `finish` needs of all blocks; all ranks call it, for the same weights in the same order."""
        whole: dict[str, Tensor] = {}
        for name in self._quantiser.asked:
            record = self._packed[name]
            mine = self._asked.pop(name, None)
            if mine is None:  # this rank has no rows
                mine = torch.empty(record.spec.local_shape, device=self._state.device.torch)
            whole[name] = self._state.gather(record.spec.key, mine, mine.dtype)
        return whole

    def finish(self, whole: dict[str, Tensor]) -> None:
        """Compute what depends on all blocks, from what `gather` has returned."""
        self._weight.recipe = self._recipe
        for name, tensor in self._quantiser.finish(whole).items():
            if name in self._packed:
                self._packed[name].to_fill().copy_(tensor.narrow(0, *self._rows(name)))
            else:
                old = self._weight._buffers[name]
                assert old is not None
                self.replaced.append(old)
                self._weight._buffers[name] = tensor.to(self._state.device.torch)

    def _rows(self, name: str = "packed") -> tuple[int, int]:
        """The first row of a packed parameter that this rank has, and how many it has."""
        spec = self._packed[name].spec
        home = self._state.topology.home(spec.strategy.home)
        return spec.layout.local_start(home.node, home.place), spec.local_shape[0]

    def _read(self, source: Source, begin: int, end: int, files: Files) -> Tensor:
        """Read a range of the elements of a tensor [rows, ...] in their order, on the model's device."""
        row = self._quantiser.shape[1:].numel()
        first, last = begin // row, -(-end // row)
        shape = (last - first, *self._quantiser.shape[1:])
        values = torch.empty(shape, dtype=self._quantiser.dtype, device="cpu")
        source.fill(values, (first, *(0 for _ in shape[1:])), files)
        mine = values.view(-1)[begin - first * row : end - first * row]
        return mine.to(self._state.device.torch)
