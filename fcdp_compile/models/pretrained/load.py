"""`load_pretrained(model, folder)`: the weights of a Hugging Face checkpoint, straight into home shards.

    headers ─ checked ─ matched ─▶ sources ─ every rank its own rows ─▶ home shards

Nothing is written before every rank has checked the files, and found the same files as the others.  Blocks of
a quantised weight are quantised while they are read from a checkpoint that is not quantised.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]  # ships no type hints

from fcdp_compile.core.params.layout import Box
from fcdp_compile.core.ranks.messages import Attempts, first_other, together
from fcdp_compile.core.sharding.folder_argument import refuse_nameless, refuse_swapped
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import CheckpointError, FcdpError
from fcdp_compile.models.files.safetensors_file import as_bytes
from fcdp_compile.models.pretrained.folder import open_checkpoint, refuse
from fcdp_compile.models.pretrained.match import Held, Match
from fcdp_compile.models.pretrained.source import CheckpointRows, Files, Source, is_local
from fcdp_compile.models.quantised.interface import Quantiser
from fcdp_compile.models.quantised.weight import QuantisedWeight
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.record import ParamRecord

log = logging.getLogger(__name__)

_COMPARED_BYTES = 2**24
_AT_ONCE = 2**18
"""Values that are quantised at a time."""


def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    head: bool = True,
    progress: bool = False,
) -> None:
    """Load a Hugging Face checkpoint into a sharded model; each rank reads the rows of its home shards.

    All ranks call it, each with a path to the same files.  Names, conversions, casts to the parameters'
    dtypes, tied weights and the tensors that may be missing are as with `from_pretrained`, except that
    nothing is initialised silently.  In a model that PEFT has wrapped, the base gets the values; adapters
    stay as they are, or without values if the model was built on meta.  If the checkpoint has a tied weight
    under several names, they must have equal values.  Values that PEFT computes from the base's weights
    (DoRA's magnitudes, PiSSA's factors) are not computed again: add such adapters after loading.
    Weights of layers that bitsandbytes quantises are quantised while they are read, or read as they are if
    the checkpoint has them quantised in the same way.

    folder: a folder with model.safetensors, or with model.safetensors.index.json and its files; or one
    safetensors file, or an index.  head: whether the checkpoint has this model's head; with False, tensors
    outside of the base model (`base_model_prefix`) may be missing and then stay as they are, and another head
    is ignored.
    progress: show a bar on rank 0.

    Raises: ArgumentError if folder and model are swapped.
    ValueError if the model is not sharded; CheckpointError on every rank, with the model unchanged,
    for a checkpoint that is damaged, lacks tensors, has extra tensors or other shapes, is a pickle, or
    is not the same for all ranks; FcdpError if reading fails midway, which leaves the model half loaded.
    """
    refuse_swapped(folder, model, "load_pretrained(model, folder)")
    root, state = model_of(model), state_of(model)
    path = Path(folder)
    destinations = Destinations(root, state)
    matched, is_on_disk = _found(root, state, folder, destinations, head=head)
    order = matched.assigned
    is_first = state.topology.number == 0
    with Files() as files:
        _fill(path, state, order, destinations, files, shows=progress and is_first)
    destinations.arrived(order)
    for weight, recipe in matched.recipes.items():
        weight.recipe = recipe
    if is_on_disk:
        # The first gather of frozen parameters then reads other nodes' rows from this node's own disk.
        rows = destinations.rows(order)
        state.transport.row_sources.offer(rows.keys, rows)
    matched.renaming.note_used()
    if matched.kept_copies and is_first:
        log.warning(
            "%s keeps its values: PEFT trains this copy (modules_to_save) instead of the tensor in %s "
            "(%d tensors in all); to start with the checkpoint's values, build on meta, or add "
            "adapters to a model that has its weights",
            matched.kept_copies[0],
            path,
            len(matched.kept_copies),
        )
    log.info("%s: %d tensors, this rank read %d bytes", path, len(order), files.read_bytes)


def _found(
    root: nn.Module,
    state: ShardedModel,
    folder: str | os.PathLike[str],
    destinations: Destinations,
    *,
    head: bool,
) -> tuple[Match, bool]:
    """Match the checkpoint with the model; also return whether each rank has it on a disk of its own node."""
    path = Path(folder)
    found: list[Match] = []

    def check() -> tuple[str, bool]:
        refuse_nameless(folder)
        if state.whole:
            refuse(
                path, ["its parameters are whole: leave the block of fcdp_compile.gathered first"]
            )
        checkpoint = open_checkpoint(path)
        matched = Match(root, checkpoint.tensors, destinations.is_unset)
        refuse(path, matched.messages(head=head))
        found.append(matched)
        files = {stored.file for stored in checkpoint.tensors.values()}
        return checkpoint.digest, all(map(is_local, files))

    verdicts = together(state.topology.everyone, check, CheckpointError)
    if other := first_other([digest for digest, _ in verdicts]):
        raise CheckpointError(
            f"{path} is not the same for all ranks: rank {other} finds other files than rank 0; copy the "
            "checkpoint to every node again"
        )
    return found[0], all(is_on_disk for _, is_on_disk in verdicts)


def _check_tied(
    path: Path, order: Sequence[Held], destinations: Destinations, files: Files
) -> None:
    """Refuse a checkpoint that has different values for one parameter."""
    problems = []
    for held in order:
        first, *others = held.sources
        for other in others:
            part = destinations.part(held)
            if not isinstance(part, Part):
                problems.append(
                    f"{held.name!r} is quantised, and two tensors are its values here; remove one"
                )
            elif not _are_equal(first, other, part, files):
                names = [s.leaves[0].name for s in (first, other)]
                problems.append(
                    f"{names[0]!r} and {names[1]!r} are one parameter of the model and differ here; "
                    "untie them (tie_word_embeddings=False in the config) before fcdp_compile.shard"
                )
    refuse(path, problems)


def _are_equal(one: Source, other: Source, part: Part, files: Files) -> bool:
    """Whether two sources hold the same bits for a part, compared some rows at a time."""
    for box in part.boxes:
        rows, *others = box.shape or (1,)
        row_bytes = part.values.itemsize * math.prod(others)
        step = max(1, _COMPARED_BYTES // max(1, row_bytes))
        for begin in range(0, rows, step):
            shape = (min(step, rows - begin), *others)[: len(box.shape)]
            at = (box.at[0] + begin, *box.at[1:]) if box.at else ()
            found = []
            for source in (one, other):
                values = torch.empty(shape, dtype=part.values.dtype, device="cpu")
                source.fill(values, at, files)
                found.append(as_bytes(values))
            if not torch.equal(*found):
                return False
    return True


def _fill(
    path: Path,
    state: ShardedModel,
    order: Sequence[Held],
    destinations: Destinations,
    files: Files,
    *,
    shows: bool,
) -> None:
    everyone = state.topology.everyone
    together(everyone, lambda: _check_tied(path, order, destinations, files), CheckpointError)
    try:
        together(everyone, lambda: _read(order, destinations, files, shows=shows))
        finished = Attempts()
        with torch.no_grad():
            for part in map(destinations.part, order):
                if isinstance(part, QuantisedPart):
                    finished.attempt(partial(part.finish, part.gather()))
        together(everyone, finished.check)
    except FcdpError as error:
        state.validity.values_changed()
        raise FcdpError(
            f"{path} was read only in part, so the model is half loaded: {error}"
        ) from error


def _read(order: Sequence[Held], destinations: Destinations, files: Files, *, shows: bool) -> None:
    parts = [destinations.part(held) for held in order]
    total = sum(part.nbytes for part in parts)
    bar = tqdm(total=total, desc="load_pretrained", unit="B", unit_scale=True, disable=not shows)
    with torch.no_grad(), bar:
        for held, part in zip(order, parts, strict=True):
            part.fill(held.sources[0], files)
            bar.update(part.nbytes)


# --- this rank's memory of the tensors of a model, to be filled in place -----------------------------------


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
