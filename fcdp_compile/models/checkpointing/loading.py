"""`load(folder, model=…, …)`: continue from a checkpoint of `save`, on this number of nodes and ranks.

    read checkpoint.json -> compare with the model and the optimizer, find the reads (`_Load`)
    -> verify every byte that is needed -> write into the model, the optimizer, …

After each step all ranks learn whether every rank succeeded; nothing is written before the last step.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fcdp_compile.core.params.home_shard import as_dtensor
from fcdp_compile.core.params.packing import take_boxes
from fcdp_compile.core.ranks.messages import first_other, together
from fcdp_compile.core.sharding.folder_argument import refuse_nameless, refuse_swapped
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.comparing import Comparison, WantedRows, restores, told
from fcdp_compile.models.checkpointing.contents import (
    JobObjects,
    Marking,
    extra_states,
    own_mark,
    parameter_name,
    parameter_names,
    persistent_buffers,
    plain_tensors,
    set_rng_state,
)
from fcdp_compile.models.checkpointing.format.disk import DataFiles, FileBlock
from fcdp_compile.models.checkpointing.format.record import TORCH_DTYPES, Slab, slabs
from fcdp_compile.models.checkpointing.format.tree import TensorReference, decode
from fcdp_compile.models.checkpointing.optimizers import put_back
from fcdp_compile.models.checkpointing.saving import bar, end_of_saves, need_bar, refuse_whole
from fcdp_compile.models.files.safetensors_file import Stored
from fcdp_compile.models.quantised.weight import quantised_weights
from fcdp_compile.runtime.model import ShardedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The `step` and the `extra` of `save`; each object of `extra` with a state is now that state."""

    step: int | None
    extra: Any


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Any = None,
    progress: bool = False,
) -> Loaded:
    """Load a checkpoint that `save` wrote, from any number of nodes and ranks (and of "tp") and any strategy.

        loaded = fcdp_compile.load("checkpoints/last", model=model, optimizer=optimizer, scheduler=scheduler)
        for step in range(loaded.step + 1, steps): …

    All ranks must call it; gradients stay as they are.  Each rank reads the rows of its home shards and the
    other values that it needs, and checks everything that it reads against checksums.  Rows are read twice,
    because nothing is written before everything has been verified.  So a damaged checkpoint changes nothing.

    On as many nodes and ranks (and "tp" ranks) as saved it, the job continues bit by bit.  On other numbers,
    ranks cannot get their own values back: where values differed, every rank gets rank 0's, with a warning,
    and random number generators stay as they are unless their states were equal on all ranks.

    model: sharded, compiled or not; with values or from meta.  Its parameters and buffers must have the
    saved names, shapes and dtypes; other parameters may be frozen than when it was saved.
    optimizer: built from the model's parameters, in the same groups as when it was saved; None: not loaded.
    scheduler, scaler: as `optimizer`.
    extra: a tree like the saved one; its objects with `load_state_dict` get their state.  May be left out.
    progress: show a bar on rank 0, of the bytes that rank 0 reads.

    Raises: ArgumentError if folder and model are swapped.
    CheckpointError on every rank, naming the file, the tensors or the groups, if there is no
    checkpoint, or a damaged one, or one of another model or optimizer; FcdpError for a progress bar without
    tqdm; ValueError if the model is not sharded.
    """
    refuse_swapped(folder, model, "load(folder, model)")
    job = JobObjects(optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra)
    return load_from(folder, model, job, progress=progress)


def load_from(
    folder: str | os.PathLike[str],
    model: nn.Module,
    job: JobObjects,
    mark: Marking = own_mark,
    *,
    progress: bool = False,
) -> Loaded:
    """Do as `load`.  mark: what tells other values of the parameters that `save` left out."""
    root, state = model_of(model), state_of(model)
    end_of_saves(state)
    found: list[_Load] = []

    def compare() -> tuple[str, list[int]]:
        refuse_nameless(folder)
        need_bar(shown=progress)
        refuse_whole(state)
        found.append(_Load(Path(folder), root, state, job, mark))
        return found[0].digest, found[0].own_marks()

    doing = f"loading from {folder}"
    everyone = together(state.topology.everyone, compare, CheckpointError, doing)
    if first_other([digest for digest, _ in everyone]):
        raise CheckpointError(
            f"ranks are about to load different things from {folder}; give the same arguments on every rank, "
            "and a folder that all nodes share"
        )
    (one,) = found
    one.check_marks([marks for _, marks in everyone])
    one.run(doing, shown=progress and state.topology.number == 0)
    return Loaded(step=one.values.get("step"), extra=one.values.get("extra"))


def needed_files(folder: Path, model: nn.Module, job: JobObjects, mark: Marking) -> set[int]:
    """The ranks whose files `load_from` reads here, besides rank 0's and this rank's own.

    Raises: CheckpointError as `load_from`; with the record, and these two files.
    """
    return _Load(folder, model_of(model), state_of(model), job, mark).needed()


class HalfLoadedError(CheckpointError):
    """A checkpoint was written into the job only in part."""


class SlabRead(NamedTuple):
    """A slab of a tensor in a rank's file."""

    file: int
    stored: Stored
    slab: Slab

    @property
    def run(self) -> tuple[int, int, int]:
        """The file, and the slab's bytes in it."""
        start = self.stored.start + self.slab.first * self.stored.dtype.itemsize
        return self.file, start, start + self.size_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the slab."""
        return math.prod(self.slab.shape) * self.stored.dtype.itemsize


class _Load(Comparison):
    """One call of `load` on one rank: the reads, and the objects that receive them.

    values: the decoded values, by name.  differing: the names of values that differed between ranks and that
    this rank takes from rank 0.  targets: the cut tensors.  restores: the objects of `extra` that take a
    state, each with its state.

    Raises: CheckpointError, naming the folder or the file and what is wrong, if checkpoint and job differ.
    """

    def __init__(
        self, folder: Path, root: nn.Module, state: ShardedModel, job: JobObjects, mark: Marking
    ) -> None:
        super().__init__(folder, root, state, job, mark)
        self.files = files = DataFiles(folder, self.record)
        rank = state.topology.number
        self.differing: list[str] = []
        if not self.is_same_layout:
            rank, self.differing = 0, [v.name for v in self.record.values if v.rank == 0]
        saved = {v.name: v for v in self.record.values if v.rank in (None, rank)}
        self.check_names(saved)
        self.values = {
            name: decode(value.tree, partial(files.read, value.rank or 0), name)
            for name, value in saved.items()
            if _is_wanted(name, job)
        }
        self.targets = self.wanted(self.values, self.differing)
        self.restores = list(restores(job.extra, self.values["extra"], "extra"))

    @cached_property
    def reads(self) -> list[SlabRead]:
        """Rows of the targets, in the order of the files."""
        found = [read for target in self.targets for read in self._reads_of(target)]
        return sorted(found, key=lambda read: read.run)

    @cached_property
    def blocks(self) -> list[FileBlock]:
        """The blocks that contain the rows; they are verified first."""
        return self.files.blocks(read.run for read in self.reads)

    def needed(self) -> set[int]:
        """The ranks whose files have rows of the targets."""
        return {
            file
            for target in self.targets
            for tensor in target.tensors
            for file, shape, held in tensor.held
            if slabs(shape, held, target.boxes, target.dtype.itemsize)
        }

    def _reads_of(self, target: WantedRows) -> Iterator[SlabRead]:
        for file, shape, held in (part for tensor in target.tensors for part in tensor.held):
            if found := slabs(shape, held, target.boxes, target.dtype.itemsize):
                stored = self.files.find(file, target.name, target.dtype, shape)
                yield from (SlabRead(file, stored, slab) for slab in found)

    @property
    def digest(self) -> str:
        """Equal on ranks that are about to load the same checkpoint into the same kinds of objects."""
        job = self.job
        given = [v is not None for v in (job.optimizer, job.scheduler, job.scaler)]
        return hashlib.sha256(f"load {self.record.checksum} {given}".encode()).hexdigest()

    def run(self, doing: str, *, shown: bool) -> None:
        """Verify all needed bytes, on every rank, and then write; shown: whether to show a bar."""
        everyone, validity = self.state.topology.everyone, self.state.validity
        names = {target.name for target in self.targets}
        records = self.state.records
        keys = [key for key, r in records.items() if parameter_name(r.spec.name) in names]
        verified_bytes = sum(map(self.files.size_of, self.blocks))
        total_bytes = verified_bytes + sum(read.size_bytes for read in self.reads)
        with bar("loading", total_bytes, shown=shown) as update:
            verify = partial(self.files.verify, self.blocks, update)
            together(everyone, verify, CheckpointError, doing)
            try:
                together(everyone, lambda: self._write(keys, update), HalfLoadedError, doing)
            except BaseException:
                # Some ranks may have written; caches must go stale on all of them alike.
                validity.values_changed()
                raise
        validity.values_arrived(keys, [name for name, _ in persistent_buffers(self.root)])

    def _write(self, keys: list[str], update: Callable[[int], object]) -> None:
        """Write everything that was read, the states of random number generators last.

        keys: of the parameters whose values are in the checkpoint.

        Raises: CheckpointError, with nothing or only a part written, if a file has changed since it was
        verified, or an object does not take its state.
        """
        try:
            moments = self._read_rows(keys, update)
            self._write_plain()
            for name, module in extra_states(self.root):
                module.set_extra_state(self.values[name])
            self._write_job(moments)
        except Exception as error:
            # Objects that take a state may raise anything; the message must say that the job is half loaded.
            raise CheckpointError(
                f"{str(error) or type(error).__name__}; the model and the other arguments may now hold a "
                f"part of {self.folder}, so load again before you go on"
            ) from error

    def _read_rows(self, keys: list[str], update: Callable[[int], object]) -> dict[str, Tensor]:
        """Read rows into the home shards of parameters, and return the optimizer's rows by name."""
        records, device = self.state.records, self.state.device.torch
        homes = {parameter_name(records[k].spec.name): records[k].to_fill() for k in keys}
        moments = {
            t.name: torch.empty(
                t.spec.local_shape, dtype=t.dtype, device=t.spec.home_device(device)
            )
            for t in self.targets
            if t.name not in homes
        }
        to = homes | moments
        with torch.no_grad():
            for file, stored, slab in self.reads:
                run = self.files.read_run(file, stored, slab.first, slab.shape)
                take_boxes(to[stored.name], run, slab.boxes)
                update(run.nbytes)
        return moments

    def _write_plain(self) -> None:
        with torch.no_grad():
            for name, tensor in plain_tensors(self.root, self.state).items():
                # Parameters that are not sharded are never on meta.
                is_buffer = not isinstance(tensor, nn.Parameter)
                if is_buffer and (tensor.is_meta or _is_expanded(tensor)):
                    made = self.values[name].to(self.state.device.torch)
                    replace_buffer(self.root, tensor, made)
                else:
                    tensor.detach().copy_(self.values[name])
        for name, weight in quantised_weights(self.root):
            _, dtype = self.values["meanings"][name]
            # A new recipe may compile the model again.
            if dtype is not None and dtype != weight.meaning[1]:
                weight.recipe = weight.recipe.made_of(TORCH_DTYPES[dtype])

    def _write_job(self, moments: dict[str, Tensor]) -> None:
        job, values, records = self.job, self.values, self.state.records.by_name
        mesh = self.state.topology.home_mesh

        def put_in(name: str, value: Any) -> Any:
            """A value, or the moment that it refers to, as a DTensor if its parameter is one."""
            if not isinstance(value, TensorReference):
                return value
            moment = moments[value.name]
            return moment if mesh is None else as_dtensor(moment, records[name].spec, mesh)

        if job.optimizer is not None:
            state = {
                name: {key: put_in(name, value) for key, value in of_one.items()}
                for name, of_one in values["optimizer.state"].items()
            }
            groups, others = values["optimizer.groups"], values["optimizer.others"]
            put_back(job.optimizer, groups, state, others, parameter_names(self.root, self.state))
        for owner, name in ((job.scheduler, "scheduler"), (job.scaler, "scaler")):
            if owner is not None:
                owner.load_state_dict(values[name])
        for taker, saved in self.restores:
            taker.load_state_dict(saved)
        # Several ranks with one rank's generator states would all use the same dropout.
        is_rng_alike = "rng" not in self.differing and len(self.record.files) > 1
        if self.is_same_layout or is_rng_alike:
            set_rng_state(values["rng"], self.state.device.torch)
        self._warn_of_differing()

    def _warn_of_differing(self) -> None:
        here = self.state.topology
        others = [n for n in self.differing if n != "rng" and n in self.values]
        notes = ["random number generators are not restored"] if "rng" in self.differing else []
        if others:
            notes.append(
                f"{', '.join(others)} differed between ranks, and every rank now has rank 0's"
            )
        if notes and here.number == 0:
            log.warning(
                "%s was saved by %s and is loaded by %s: %s",
                self.folder,
                told(self.record.layout),
                told((here.nodes, here.ranks_per_node, here.sharers)),
                "; ".join(notes),
            )


def _is_wanted(name: str, job: JobObjects) -> bool:
    owner, _, _ = name.partition(".")
    return owner not in ("optimizer", "scheduler", "scaler") or getattr(job, owner) is not None


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share memory, so that they cannot be written one by one."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in strides)


def replace_buffer(root: nn.Module, old: Tensor, made: Tensor) -> None:
    """Replace a buffer wherever the model holds it, because it has no memory of its own for each element."""
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is old:
                module._buffers[name] = made
