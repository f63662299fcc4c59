"""`load(folder, model=…, …)`: continue from a checkpoint of `save`, on this number of nodes and ranks.

    read checkpoint.json -> compare with the model and the optimizer, find the reads (`LoadPlan`)
    -> verify every byte that is needed -> write into the model, the optimizer, …

After each step all ranks learn whether every rank succeeded; nothing is written before the last step.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fcdp_compile.core.params.home_shard import as_dtensor
from fcdp_compile.core.params.packing import block_of
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.ranks.differences import first_other
from fcdp_compile.core.ranks.messages import together
from fcdp_compile.core.sharding.folder_argument import refuse_nameless, refuse_swapped
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.comparing import Comparison, WantedRows, restores, told
from fcdp_compile.models.checkpointing.contents import (
    JobObjects,
    extra_states,
    parameter_name,
    parameter_names,
    persistent_buffers,
    plain_tensors,
    set_rng_state,
)
from fcdp_compile.models.checkpointing.format.blocks import DataFiles, FileBlock
from fcdp_compile.models.checkpointing.format.cuts import Slab, slabs
from fcdp_compile.models.checkpointing.format.record import (
    TORCH_DTYPES,
    CheckpointRecord,
    read_record,
)
from fcdp_compile.models.checkpointing.format.tree import TensorReference, decode
from fcdp_compile.models.checkpointing.optimizers import put_back
from fcdp_compile.models.checkpointing.progress import bar, need_bar
from fcdp_compile.models.checkpointing.saving import end_of_saves, refuse_whole
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
    root, state = model_of(model), state_of(model)
    end_of_saves(state)
    plan = _compared(folder, root, state, job, progress=progress)
    _load(plan, progress=progress)
    return Loaded(step=plan.values.get("step"), extra=plan.values.get("extra"))


def _compared(
    folder: str | os.PathLike[str],
    root: nn.Module,
    state: ShardedModel,
    job: JobObjects,
    *,
    progress: bool,
) -> LoadPlan:
    """Return this rank's plan, once all ranks are known to load the same checkpoint."""
    found: list[LoadPlan] = []

    def compare() -> tuple[str, list[int]]:
        refuse_nameless(folder)
        need_bar(shown=progress)
        refuse_whole(state)
        found.append(_look(Path(folder), root, state, job))
        return found[0].digest, found[0].comparison.own_marks()

    doing = f"loading from {folder}"
    everyone = together(state.topology.everyone, compare, CheckpointError, doing)
    if first_other([digest for digest, _ in everyone]):
        raise CheckpointError(
            f"ranks are about to load different things from {folder}; give the same arguments on every rank, "
            "and a folder that all nodes share"
        )
    (plan,) = found
    plan.comparison.check_marks([marks for _, marks in everyone])
    return plan


def _load(plan: LoadPlan, *, progress: bool) -> None:
    """Verify all needed bytes, on every rank, and then write."""
    state, topology = plan.state, plan.state.topology
    doing = f"loading from {plan.folder}"
    shows = progress and topology.number == 0
    with bar("loading", plan.size_bytes, shown=shows) as update:
        together(
            topology.everyone,
            lambda: plan.files.verify(plan.blocks, update),
            CheckpointError,
            doing,
        )
        try:
            together(topology.everyone, lambda: _write(plan, update), CheckpointError, doing)
        except BaseException:
            # Some ranks may have written; caches must go stale on all of them alike.
            state.validity.values_changed()
            raise
    buffers = [name for name, _ in persistent_buffers(plan.root)]
    state.validity.values_arrived(plan.written_keys, buffers)


# --- the plan -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabRead:
    """A slab of a part in a file, and the name of its tensor."""

    name: str
    file: int
    stored: Stored
    slab: Slab

    @property
    def start(self) -> int:
        """The slab's first byte in the file."""
        return self.stored.start + self.slab.first * self.stored.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the slab."""
        return torch.Size(self.slab.shape).numel() * self.stored.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The reads of one rank, and the objects that receive them.

    values: the decoded values, by name.  differing: the names of values that differed between ranks and that
    this rank takes from rank 0.  targets: the cut tensors.  restores: the objects of `extra` that take a
    state, each with its state.  reads: rows of the targets, in the order of the files.  blocks: the blocks
    that contain these rows; they are verified first.
    """

    folder: Path
    root: nn.Module
    state: ShardedModel
    job: JobObjects
    record: CheckpointRecord
    files: DataFiles
    comparison: Comparison
    values: dict[str, Any]
    differing: list[str]
    targets: list[WantedRows]
    restores: list[tuple[Any, Any]]
    reads: list[SlabRead]
    blocks: list[FileBlock]

    @property
    def digest(self) -> str:
        """Equal on ranks that are about to load the same checkpoint into the same kinds of objects."""
        job = self.job
        given = [v is not None for v in (job.optimizer, job.scheduler, job.scaler)]
        return hashlib.sha256(f"load {self.record.checksum} {given}".encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Bytes that are read, first to verify blocks and then to load."""
        verified = sum(self.files.size_of(block) for block in self.blocks)
        return verified + sum(read.size_bytes for read in self.reads)

    @property
    def written_keys(self) -> list[str]:
        """The keys of the parameters whose values are in the checkpoint."""
        names = {target.name for target in self.targets}
        records = self.state.records.items()
        return [key for key, r in records if parameter_name(r.spec.name) in names]


def _look(folder: Path, root: nn.Module, state: ShardedModel, job: JobObjects) -> LoadPlan:
    """Compare the checkpoint in a folder with a job.

    Raises: CheckpointError, naming the folder or the file and what is wrong.
    """
    record = read_record(folder)
    files = DataFiles(folder, record)
    comparison = Comparison(folder, record, root, state, job)
    rank, differing = state.topology.number, []
    if not comparison.is_same_layout:
        rank, differing = 0, [v.name for v in record.values if v.rank == 0]
    saved = {v.name: v for v in record.values if v.rank in (None, rank)}
    comparison.check_names(saved)
    values = {
        name: decode(value.tree, _reader(files, value.rank or 0), name)
        for name, value in saved.items()
        if _is_wanted(name, job)
    }
    targets = comparison.targets(values, differing)
    reads = [read for target in targets for read in _reads_of(target, files)]
    reads.sort(key=lambda read: (read.file, read.start))
    runs = [(read.file, read.start, read.start + read.size_bytes) for read in reads]
    return LoadPlan(
        folder=folder,
        root=root,
        state=state,
        job=job,
        record=record,
        files=files,
        comparison=comparison,
        values=values,
        differing=differing,
        targets=targets,
        restores=list(restores(job.extra, values["extra"], "extra")),
        reads=reads,
        blocks=files.blocks(runs),
    )


def _is_wanted(name: str, job: JobObjects) -> bool:
    owner, _, _ = name.partition(".")
    return owner not in ("optimizer", "scheduler", "scaler") or getattr(job, owner) is not None


def _reader(files: DataFiles, file: int) -> Any:
    def read(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        return files.read(file, files.find(file, name, dtype, shape))

    return read


def _reads_of(target: WantedRows, files: DataFiles) -> Iterator[SlabRead]:
    dtype = TORCH_DTYPES[target.dtype]
    for file, shape, held in (part for tensor in target.tensors for part in tensor.held):
        if found := slabs(shape, held, target.boxes, dtype.itemsize):
            stored = files.find(file, target.name, dtype, shape)
            yield from (
                SlabRead(name=target.name, file=file, stored=stored, slab=slab) for slab in found
            )


# --- writing ------------------------------------------------------------------------------------------------


def _write(plan: LoadPlan, update: Callable[[int], object]) -> None:
    """Write everything that was read, the states of random number generators last.

    Raises: CheckpointError, with nothing or only a part written, if a file has changed since it was verified,
    or an object does not take its state.
    """
    try:
        moments = _read_rows(plan, update)
        _write_plain(plan)
        for name, module in extra_states(plan.root):
            module.set_extra_state(plan.values[name])
        _write_job(plan, moments)
    except Exception as error:
        # Objects that take a state may raise anything; the message must say that the job is half loaded.
        raise CheckpointError(
            f"{str(error) or type(error).__name__}; the model and the other arguments may now hold a part "
            f"of {plan.folder}, so load again before you go on"
        ) from error


def _read_rows(plan: LoadPlan, update: Callable[[int], object]) -> dict[str, Tensor]:
    """Read rows into the home shards of parameters, and return the optimizer's rows by name."""
    records, device = plan.state.records, plan.state.device.torch
    homes = {parameter_name(records[k].spec.name): records[k].to_fill() for k in plan.written_keys}
    moments = {
        t.name: torch.empty(
            t.spec.local_shape,
            dtype=TORCH_DTYPES[t.dtype],
            device=device if t.spec.computes_on is None else "cpu",
        )
        for t in plan.targets
        if t.name not in homes
    }
    to = homes | moments
    with torch.no_grad():
        for read in plan.reads:
            _copy(plan, read, to[read.name])
            update(read.size_bytes)
    return moments


def _copy(plan: LoadPlan, read: SlabRead, to: Tensor) -> None:
    run = plan.files.read_run(read.file, read.stored, read.slab.first, read.slab.shape)
    for keep, first in read.slab.moves:
        shape = [b - a for a, b in keep]
        block_of(to, first, shape).copy_(block_of(run, [a for a, _ in keep], shape))


def _write_plain(plan: LoadPlan) -> None:
    with torch.no_grad():
        for name, tensor in plain_tensors(plan.root, plan.state).items():
            # Parameters that are not sharded are never on meta.
            is_buffer = not isinstance(tensor, nn.Parameter)
            if is_buffer and (tensor.is_meta or _is_expanded(tensor)):
                _replace_buffer(plan.root, tensor, plan.values[name].to(plan.state.device.torch))
            else:
                tensor.detach().copy_(plan.values[name])
    for name, weight in quantised_weights(plan.root):
        _, dtype = plan.values["meanings"][name]
        if (
            dtype is not None and dtype != weight.meaning[1]
        ):  # a new recipe may compile the model again
            weight.recipe = weight.recipe.made_of(TORCH_DTYPES[dtype])


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share memory, so that they cannot be written one by one."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in strides)


def _replace_buffer(root: nn.Module, old: Tensor, made: Tensor) -> None:
    """Replace a buffer wherever the model holds it, because it has no memory of its own for each element."""
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is old:
                module._buffers[name] = made


def _write_job(plan: LoadPlan, moments: dict[str, Tensor]) -> None:
    job, values = plan.job, plan.values
    mesh = plan.state.topology.home_mesh

    def moment(name: str, spec: ParamSpec) -> Tensor:
        """The moment, as a DTensor if its parameter is one."""
        if mesh is None:
            return moments[name]
        return as_dtensor(moments[name], spec, mesh)

    if job.optimizer is not None:
        specs = {r.spec.name: r.spec for r in plan.state.records.values()}
        state = {
            name: {
                key: moment(value.name, specs[name])
                if isinstance(value, TensorReference)
                else value
                for key, value in of_one.items()
            }
            for name, of_one in values["optimizer.state"].items()
        }
        groups, others = values["optimizer.groups"], values["optimizer.others"]
        put_back(job.optimizer, groups, state, others, parameter_names(plan.root, plan.state))
    for owner, name in ((job.scheduler, "scheduler"), (job.scaler, "scaler")):
        if owner is not None:
            owner.load_state_dict(values[name])
    for taker, saved in plan.restores:
        taker.load_state_dict(saved)
    # Several ranks with one rank's generator states would all use the same dropout.
    is_rng_alike = "rng" not in plan.differing and len(plan.record.files) > 1
    if plan.comparison.is_same_layout or is_rng_alike:
        set_rng_state(values["rng"], plan.state.device.torch)
    _warn_of_differing(plan)


def _warn_of_differing(plan: LoadPlan) -> None:
    here = plan.state.topology
    others = [n for n in plan.differing if n != "rng" and n in plan.values]
    notes = ["random number generators are not restored"] if "rng" in plan.differing else []
    if others:
        notes.append(f"{', '.join(others)} differed between ranks, and every rank now has rank 0's")
    if notes and here.number == 0:
        log.warning(
            "%s was saved by %s and is loaded by %s: %s",
            plan.folder,
            told(plan.record.layout),
            told((here.nodes, here.ranks_per_node, here.sharers)),
            "; ".join(notes),
        )
