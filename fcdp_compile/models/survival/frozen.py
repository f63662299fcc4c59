"""The frozen parameters of a job in the memory of each node: all of them, in the format of a checkpoint.

    first commit   copies of gathered parameters ─▶ the file of every rank of a checkpoint, on every node
    restart        memory of this node ─▶ home shards, and other nodes' rows (`runtime.cache.row_sources`)

Files are as the ranks of the first commit would write them, so any number of nodes and ranks can read them.
Each rank writes the files of the ranks at its place of all nodes: their home shards are what it has gathered.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fcdp_compile.core.params.layout import Box
from fcdp_compile.core.params.packing import rows_of, take_boxes
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.ranks.messages import first_other, together
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.contents import parameter_name, persistent_buffers
from fcdp_compile.models.checkpointing.format.disk import DataFiles, Disk
from fcdp_compile.models.checkpointing.format.record import (
    BLOCK_BYTES,
    TORCH_DTYPES,
    CheckpointRecord,
    CutTensor,
    DataFile,
    SavedValue,
    cut,
    folder_of,
    read_record,
    seal,
    slabs,
)
from fcdp_compile.models.checkpointing.format.tree import Encoded, decode, encode
from fcdp_compile.models.checkpointing.loading import replace_buffer
from fcdp_compile.models.files.safetensors_file import as_bytes
from fcdp_compile.runtime.buckets.bound_bucket import shards_in_copy
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.runtime.parameters.record import ParamRecord
from fcdp_compile.strategy import Scope

_BUFFERS = "buffers"
"""The name of the value that has the buffers which no state dict has."""


def frozen_records(state: ShardedModel) -> list[ParamRecord]:
    """The parameters that need no gradient now, in the model's order."""
    return [r for r in state.records.values() if not r.parameter().requires_grad]


def keep_frozen(root: nn.Module, state: ShardedModel, memory: Path, disk: Disk) -> tuple[Path, str]:
    """Write the frozen parameters to a new folder of each node; all ranks call it.

    memory: this node's folder of such folders.

    Returns: the folder, and the checksum of its record.

    Raises: CheckpointError on every rank if a file cannot be written, or if nodes have other values.
    """
    topology = state.topology
    everyone, leads = topology.everyone, disk.leads(topology)
    doing = "keeping frozen parameters in the nodes' memory"
    tensors, parts = _parts(state)
    buffers = _encoded_buffers(root)
    told = together(everyone, lambda: (buffers.digest(), secrets.token_hex(8)), doing=doing)
    if first_other([digest for digest, _ in told]) is not None:
        buffers = encode({}, _BUFFERS, copy=False)
    if _number(state, 0) == 0:
        parts[0] |= buffers.tensors
    new = told[0][1]
    folder = memory / new

    def write() -> dict[int, DataFile]:
        numbers = [_number(state, node) for node in range(topology.nodes)]
        with _room_for_frozen(folder):
            return {
                number: disk.write_data(folder / folder_of(new), number, part, lambda count: None)
                for number, part in zip(numbers, parts, strict=True)
            }

    def begin() -> None:
        with _room_for_frozen(folder):
            if leads:
                disk.make_folders(folder, new)

    together(everyone, begin, CheckpointError, doing)
    files = _agreed(together(everyone, write, CheckpointError, doing))
    record = CheckpointRecord(
        checksum="",
        id=new,
        nodes=topology.nodes,
        ranks_per_node=topology.ranks_per_node,
        block_bytes=BLOCK_BYTES,
        files=tuple(files),
        tensors=tuple(tensors),
        left_out=(),
        values=(SavedValue(name=_BUFFERS, rank=None, tree=buffers.tree),),
        tp=topology.sharers,
    )
    sealed = seal(record)

    def put() -> None:
        with _room_for_frozen(folder):
            if leads:
                disk.put_record(folder, sealed)

    together(everyone, put, CheckpointError, doing)
    return folder, sealed.checksum


@contextmanager
def _room_for_frozen(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder}: {error.strerror}; a node's memory needs room for all frozen "
            "parameters, so let FCDP_NODE_MEMORY name a larger tmpfs"
        ) from error


def _parts(state: ShardedModel) -> tuple[list[CutTensor], list[dict[str, Tensor]]]:
    """How frozen parameters are cut, and for each node the rows that the rank at this rank's place writes."""
    topology, records = state.topology, frozen_records(state)
    rows = _OtherNodes(state, records)
    tensors: list[CutTensor] = []
    parts: list[dict[str, Tensor]] = [{} for _ in range(topology.nodes)]
    for index, record in enumerate(records):
        name = parameter_name(record.spec.name)
        dtype = str(record.spec.home_dtype).removeprefix("torch.")
        made = cut(name, dtype, record.spec, topology.position, topology.sharers, index)
        tensors += made
        for node, shard in enumerate(rows.of(record)):
            if any(_number(state, node) in tensor.files for tensor in made):
                parts[node][name] = shard
    return tensors, parts


def _number(state: ShardedModel, node: int) -> int:
    """The number of the rank at this rank's place of a node (`Topology.number`)."""
    topology = state.topology
    return topology.number + (node - topology.node) * topology.ranks_per_node * topology.sharers


def _agreed(written: Sequence[Mapping[int, DataFile]]) -> list[DataFile]:
    """The files by rank, which must be the same on every node."""
    files: dict[int, DataFile] = {}
    for of_one in written:
        for number, file in of_one.items():
            if files.setdefault(number, file) != file:
                raise CheckpointError(
                    f"frozen parameters of rank {number} have other values on some nodes, so training has "
                    "gone wrong before; look for damaged memory, or report a bug in fcdp"
                )
    return [files[number] for number in sorted(files)]


def _encoded_buffers(root: nn.Module) -> Encoded:
    kept = {name for name, _ in persistent_buffers(root)}
    others = {name: b.detach() for name, b in root.named_buffers() if name not in kept}
    return encode({n: b for n, b in others.items() if not b.is_meta}, _BUFFERS, copy=True)


class _OtherNodes:
    """The home shards of this rank's place on every node."""

    def __init__(self, state: ShardedModel, records: Sequence[ParamRecord]) -> None:
        self._state = state
        mine = [self._in_copy(record) is not None for record in records]
        group, doing = (
            state.topology.everyone,
            "the agreement on which copies of frozen parameters exist",
        )
        everyone = together(group, lambda: mine, doing=doing)
        self._all_have = {
            record.spec.key: all(has)
            for record, has in zip(records, zip(*everyone, strict=True), strict=True)
        }

    def of(self, record: ParamRecord) -> list[Tensor]:
        """By node; all ranks call it for the same parameters."""
        state, spec, own = self._state, record.spec, record.peek()
        nodes, place = state.topology.nodes, state.topology.place
        if nodes == 1 or spec.strategy.home is not Scope.GLOBAL or spec.layout.dim is None:
            return [own] * nodes
        if self._all_have[spec.key]:
            found = self._in_copy(record)
            assert found is not None, "it was there just now"
            return found
        whole = state.gather(spec.key, own.to(state.device.torch), spec.home_dtype)
        return [rows_of(whole, spec.layout, node, place).cpu() for node in range(nodes)]

    def _in_copy(self, record: ParamRecord) -> list[Tensor] | None:
        """Read them in a copy, unless the home shard has been changed since the copy was made."""
        own, node = record.peek(), self._state.topology.node
        for bucket in self._state.buckets.of(record.spec.key):
            found = shards_in_copy(bucket, record.spec)
            if found is not None and torch.equal(as_bytes(found[node]), as_bytes(own)):
                return found
        return None


# --- after a restart --------------------------------------------------------------------------------------


class KeptFrozen:
    """The frozen parameters in a folder of this node; it also reads other ranks' rows (`row_sources.Rows`).

    Raises, in every method: CheckpointError, naming the file, if it is damaged.
    """

    def __init__(self, root: nn.Module, folder: Path) -> None:
        self._root, self._state = model_of(root), state_of(root)
        self.record = read_record(folder)
        self._files = DataFiles(folder, self.record)
        self._tensors: dict[str, list[CutTensor]] = {}
        for tensor in self.record.tensors:
            self._tensors.setdefault(tensor.name, []).append(tensor)

    def check(self) -> None:
        """Raise CheckpointError if the model's frozen parameters are others."""
        here = {parameter_name(r.spec.name): r.spec for r in frozen_records(self._state)}
        for name in sorted({*here, *self._tensors}):
            spec, tensors = here.get(name), self._tensors.get(name)
            if spec is None or tensors is None:
                where = "in the model" if tensors is None else "in the nodes' memory"
                raise CheckpointError(f"{name} is a frozen parameter only {where}")
            now, kept = (
                (spec.whole_shape, spec.home_dtype),
                (tensors[0].whole_shape, tensors[0].dtype),
            )
            if now != (kept[0], TORCH_DTYPES[kept[1]]):
                raise CheckpointError(
                    f"{name} is {kept[1]} {kept[0]} in the nodes' memory, not {now}"
                )

    def fill(self) -> list[str]:
        """Give this rank's home shards and buffers their values; return the parameters' keys."""
        records = frozen_records(self._state)
        with torch.no_grad():
            for record in records:
                home = self._state.topology.home(record.spec.strategy.home)
                self._read(record.spec, record.spec.boxes(home.node, home.place), record.to_fill())
            self._fill_buffers()
        return [record.spec.key for record in records]

    def read(self, key: str, node: int, place: int) -> Tensor:
        """Read the home shard of the rank at a place of a node."""
        spec = self._state.spec(key)
        out = torch.empty(spec.layout.local_shape(node, place), dtype=spec.home_dtype, device="cpu")
        self._read(spec, spec.boxes(node, place), out)
        return out

    def close(self) -> None:
        """Nothing is open between reads."""

    def _read(self, spec: ParamSpec, wanted: Sequence[Box], out: Tensor) -> None:
        name, dtype = parameter_name(spec.name), spec.home_dtype
        for file, shape, held in (part for tensor in self._tensors[name] for part in tensor.held):
            if found := slabs(shape, held, wanted, dtype.itemsize):
                stored = self._files.find(file, name, dtype, shape)
                for slab in found:
                    run = self._files.read_run(file, stored, slab.first, slab.shape)
                    take_boxes(out, run, slab.boxes)

    def _fill_buffers(self) -> None:
        (value,) = self.record.values
        kept: dict[str, Any] = decode(value.tree, partial(self._files.read, 0), value.name)
        for name, buffer in list(self._root.named_buffers()):
            if name in kept and buffer.is_meta:
                replace_buffer(self._root, buffer, kept[name].to(self._state.device.torch))
                self._state.validity.values_arrived([], [name])
