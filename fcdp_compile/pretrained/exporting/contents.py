"""What an export will hold, before a single value is gathered.

state dict ── leaves ──▶ meta tensors ── what Transformers does to names and tensors ──▶ files
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fcdp_compile.errors import FcdpError
from fcdp_compile.files.safetensors_writer import TensorMeta
from fcdp_compile.pretrained.exporting.shard_files import TensorFile, split, write_index
from fcdp_compile.pretrained.exporting.tape import Tape
from fcdp_compile.pretrained.exporting.whole_values import WholeValues
from fcdp_compile.runtime.parameters.record import ParamRecord


class Source(Hashable, Protocol):
    """Where a whole tensor comes from."""

    def whole(self, values: WholeValues) -> Tensor | None:
        """The tensor on the CPU of the writer, None on other ranks; all ranks must call it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OfParameter:
    """A sharded parameter."""

    record: ParamRecord

    def whole(self, values: WholeValues) -> Tensor | None:
        """As `Source` says."""
        return values.whole(self.record)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A buffer or an ignored parameter, which every rank has whole; the writer's is taken."""

    tensor: Tensor

    def whole(self, values: WholeValues) -> Tensor | None:
        """As `Source` says."""
        if not values.is_writer:
            return None
        return self.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contents:
    """What a folder will hold.

    files: with tensors of the tape, each to be written by the writer.  describe: writes everything else.
    """

    tape: Tape[Source]
    files: list[TensorFile]
    describe: Callable[[Path], None]


class Leaves:
    """The leaves of a tape for the tensors of a model; one for each tensor, wherever it is used.

    records: of the sharded parameters; none for a model that is not sharded.
    """

    def __init__(self, records: list[ParamRecord]) -> None:
        self.tape: Tape[Source] = Tape()
        self._records = {id(place): r for r in records for place in r.places()}
        self._made: dict[int, Tensor] = {}
        self._held: list[Tensor] = []

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """The leaf of a parameter or buffer.

        Raises: FcdpError for a DTensor that no record knows.
        """
        if id(tensor) not in self._made:
            meta = TensorMeta(dtype=tensor.dtype, shape=tuple(tensor.shape))
            self._made[id(tensor)] = self.tape.leaf(self.source(name, tensor), meta)
            self._held.append(tensor)
        return self._made[id(tensor)]

    def source(self, name: str, tensor: Tensor) -> Source:
        """Where the values of a parameter or buffer come from."""
        if (record := self._records.get(id(tensor))) is not None:
            record.parameter()  # raises if what was put there is cut otherwise
            return OfParameter(record=record)
        if isinstance(tensor, DTensor):
            raise FcdpError(
                f"{name!r} was put into the model as a DTensor after fcdp_compile.shard, so nothing is known "
                "of its cut; finish the model's structure and shard it then"
            )
        return Held(tensor=tensor)

    def of_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The leaves by the names of the model's state dict.

        Raises: FcdpError for a state dict with something else than tensors.
        """
        state = model.state_dict(keep_vars=True)  # the parameters themselves: nothing is gathered
        for name, value in state.items():
            if not isinstance(value, Tensor):
                raise FcdpError(
                    f"{name!r} of the model's state dict is a {type(value).__name__}, and a safetensors file "
                    "holds only tensors; leave it out of get_extra_state"
                )
        return {name: self.of(name, value) for name, value in state.items()}


def plain_contents(
    model: nn.Module, tape: Tape[Source], state: dict[str, Tensor], max_shard_bytes: int
) -> Contents:
    """Of a model of no library: all names of its state dict, so that `load_state_dict` takes the file.

    state: leaves by these names.
    """
    files = split("model", state, max_shard_bytes)
    return Contents(tape=tape, files=files, describe=index_writer(files, "model", elements(model)))


def index_writer(files: list[TensorFile], stem: str, parameters: int) -> Callable[[Path], None]:
    """What writes the index of several files, and nothing for one."""

    def write(folder: Path) -> None:
        if len(files) > 1:
            write_index(folder, stem, files, parameters)

    return write


def elements(model: nn.Module) -> int:
    """How many elements the parameters of a model have."""
    return sum(p.numel() for p in model.parameters())
