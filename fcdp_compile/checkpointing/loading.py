"""`load(folder, model=…, …)`: continue from what `save` wrote, on this number of nodes and ranks.

    read checkpoint.json -> compare with the model and the optimizer -> verify every byte that is needed
    -> write into the model, the optimizer, …

All ranks hear of each step whether all succeeded; nothing is written before the last.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp_compile.checkpointing.comparing import Comparison, restores
from fcdp_compile.checkpointing.contents import (
    Job,
    extra_states,
    parameter_name,
    parameter_names,
    persistent_buffers,
    plain_tensors,
)
from fcdp_compile.checkpointing.format.blocks import DataFiles
from fcdp_compile.checkpointing.format.boxes import Cut, Slab, slabs
from fcdp_compile.checkpointing.format.record import (
    TORCH_DTYPES,
    SavedValue,
    read_record,
)
from fcdp_compile.checkpointing.format.tree import Reference, decode
from fcdp_compile.checkpointing.optimizers import put_back
from fcdp_compile.checkpointing.progress import Bar, bar, need_bar
from fcdp_compile.checkpointing.rng import set_rng_state
from fcdp_compile.checkpointing.saving import end_of_saves, refuse_whole
from fcdp_compile.errors import CheckpointError
from fcdp_compile.files.safetensors_header import Stored
from fcdp_compile.params.home_shard import placements_of
from fcdp_compile.params.registry import ParamSpec
from fcdp_compile.ranks.all_or_none import together
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.sharding.folder_argument import refuse_nameless, refuse_swapped
from fcdp_compile.sharding.shard import model_of, state_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What `save` was given: the step, and `extra`, of objects with a state the state."""

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
    """Load a checkpoint that `save` wrote, from any number of nodes and ranks and any strategy.

        loaded = fcdp_compile.load("checkpoints/last", model=model, optimizer=optimizer, scheduler=scheduler)
        for step in range(loaded.step + 1, steps): …

    All ranks must call it; gradients stay as they are.  Each reads the rows of its home shards and whatever
    else it needs, all of it against checksums, and twice: nothing is written before all that is needed has
    been proven intact.  So a damaged checkpoint changes nothing.

    On as many nodes and ranks as saved it, the job continues bit by bit.  Elsewhere ranks can't get what each
    of them had: of values that differed every rank gets rank 0's, with a warning, and random number
    generators stay as they are unless all ranks had them alike.

    model: sharded, compiled or not; with values or from meta.  Its parameters and buffers must have the
    names, shapes and dtypes of those that were saved; which are frozen may differ.
    optimizer: built from the model's parameters, in the same groups as when it was saved; None: not loaded.
    scheduler, scaler: as `optimizer`.
    extra: like that which was saved; where it has objects with `load_state_dict` they get their state.  May
    be left out.
    progress: show a bar on rank 0, of what that reads.

    Raises: ArgumentError if folder and model are swapped.
    CheckpointError on every rank, naming the file, the tensors or the groups, if there is no
    checkpoint, or a damaged one, or one of another model or optimizer; FcdpError for a progress bar without
    tqdm; ValueError if the model is not sharded.
    """
    refuse_swapped(folder, model, "load(folder, model)")
    job = Job(optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra)
    state = state_of(model)
    end_of_saves(state)
    loading = _Loading(Path(folder), model_of(model), state, job)
    control, doing = state.topology.control, f"loading from {folder}"
    shows = progress and state.topology.node == state.topology.place == 0

    def look() -> tuple[str, list[int]]:
        refuse_nameless(folder)
        need_bar(shown=progress)
        refuse_whole(state)
        return loading.look(), loading.marks

    looks = together(control, look, CheckpointError, doing)
    if len({digest for digest, _ in looks}) > 1:
        raise CheckpointError(
            f"ranks are about to load different things from {folder}; give the same arguments on every rank, "
            "and a folder that all nodes share"
        )
    loading.check_marks([marks for _, marks in looks])
    with bar("loading", loading.size_bytes, shown=shows) as shown:
        together(control, lambda: loading.verify(shown), CheckpointError, doing)
        try:
            together(control, lambda: loading.write(shown), CheckpointError, doing)
        except BaseException:
            # Some ranks may have written; caches must go stale on all of them alike.
            state.values_loaded()
            raise
    buffers = [name for name, _ in persistent_buffers(model_of(model))]
    state.values_arrived(loading.written_keys(), buffers)
    return Loaded(step=loading.values.get("step"), extra=loading.values.get("extra"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """A slab of a part in a file, and the name of the tensor that it is of."""

    name: str
    file: int
    stored: Stored
    slab: Slab

    @property
    def start(self) -> int:
        """Its first byte in the file."""
        return self.stored.start + self.slab.first * self.stored.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the slab."""
        return torch.Size(self.slab.shape).numel() * self.stored.dtype.itemsize


class _Loading:
    """One load on this rank, step after step."""

    def __init__(self, folder: Path, root: nn.Module, state: ShardedModel, job: Job) -> None:
        self._folder, self._root, self._state, self._job = folder, root, state, job
        self.values: dict[str, Any] = {}
        self.size_bytes = 0  # of both reads
        self.marks: list[int] = []  # this rank's parts, of what was left out
        self._reads: list[_Read] = []

    # --- before anything is written -----------------------------------------------------------------------

    def look(self) -> str:
        """Compare the checkpoint with the job; what must be the same on every rank."""
        self._record = read_record(self._folder)
        self._files = DataFiles(self._folder, self._record)
        here = self._state.topology
        job = Comparison(self._folder, self._record, self._root, self._state, self._job)
        self._is_same_layout = job.is_same_layout
        self._differing: list[str] = []
        saved = self._of_this_rank(here.node * here.ranks_per_node + here.place)
        job.check_names(saved)
        self.marks = job.own_marks()
        self._comparison = job
        self.values = {v.name: self._decoded(v) for v in self._wanted(saved.values())}
        self._targets = job.targets(self.values, self._differing)
        self._restores = list(restores(self._job.extra, self.values["extra"], "extra"))
        given = [
            v is not None for v in (self._job.optimizer, self._job.scheduler, self._job.scaler)
        ]
        self._reads = sorted(self._plan(), key=lambda read: (read.file, read.start))
        runs = [(read.file, read.start, read.start + read.size_bytes) for read in self._reads]
        self._blocks = self._files.blocks(runs)
        self.size_bytes = sum(read.size_bytes for read in self._reads)
        self.size_bytes += sum(self._files.size_of(block) for block in self._blocks)
        return hashlib.sha256(f"load {self._record.checksum} {given}".encode()).hexdigest()

    def check_marks(self, parts: Sequence[Sequence[int]]) -> None:
        """Compare what the checkpoint leaves out; parts: `marks` of all ranks."""
        self._comparison.check_marks(parts)

    def verify(self, shown: Bar) -> None:
        """Read everything once."""
        self._files.verify(self._blocks, shown.update)

    def _of_this_rank(self, rank: int) -> dict[str, SavedValue]:
        found: dict[str, SavedValue] = {}
        for value in self._record.values:
            if value.rank is None or value.rank == (rank if self._is_same_layout else 0):
                found[value.name] = value
            if value.rank == 0 and not self._is_same_layout:
                self._differing.append(value.name)
        return found

    def _wanted(self, saved: Iterable[SavedValue]) -> Iterator[SavedValue]:
        for value in saved:
            owner, _, _ = value.name.partition(".")
            unused = {"optimizer", "scheduler", "scaler"} & {owner}
            if not unused or getattr(self._job, owner) is not None:
                yield value

    def _decoded(self, value: SavedValue) -> Any:
        file = value.rank or 0

        def read(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            return self._files.read(file, self._files.find(file, name, dtype, shape))

        return decode(value.tree, read, value.name)

    def _plan(self) -> Iterator[_Read]:
        for target in self._targets:
            tensor, dtype = target.tensor, TORCH_DTYPES[target.tensor.dtype]
            start = 0
            for rows, file in zip(tensor.rows, tensor.files, strict=True):
                part = Cut(dim=tensor.dim, start=start, stop=start + rows)
                start += rows
                shape = tuple(b - a for a, b in part.bounds(tensor.shape))
                needed = list(slabs(tensor.shape, part, target.want, dtype.itemsize))
                if needed:
                    stored = self._files.find(file, tensor.name, dtype, shape)
                    yield from (
                        _Read(name=tensor.name, file=file, stored=stored, slab=s) for s in needed
                    )

    # --- writing ------------------------------------------------------------------------------------------

    def write(self, shown: Bar) -> None:
        """Write what was read into everything, the generators of random numbers last.

        Raises: CheckpointError, with nothing or a part of it written, if a file has changed since it was
        verified, or an object does not take its state.
        """
        try:
            self._write(shown)
        except Exception as error:
            # Whatever objects that take a state raise; what is half loaded must be said in any case.
            raise CheckpointError(
                f"{str(error) or type(error).__name__}; the model and the other arguments may now hold "
                f"a part of {self._folder}, so load again before you go on"
            ) from error

    def _write(self, shown: Bar) -> None:
        records = self._state.records
        to = {parameter_name(records[k].spec.name): records[k].local() for k in self.written_keys()}
        device = self._state.device.torch
        for target in self._targets:
            if target.tensor.name not in to:
                dtype = TORCH_DTYPES[target.tensor.dtype]
                empty = torch.empty(target.spec.local_shape, dtype=dtype, device=device)
                to[target.tensor.name] = empty
        with torch.no_grad():
            for read in self._reads:
                self._copy(read, to[read.name])
                shown.update(read.size_bytes)
            for name, tensor in plain_tensors(self._root, self._state).items():
                # Parameters that are not sharded are never on meta.
                is_buffer = not isinstance(tensor, nn.Parameter)
                if is_buffer and (tensor.is_meta or _is_expanded(tensor)):
                    self._put_buffer(tensor, self.values[name])
                else:
                    tensor.detach().copy_(self.values[name])
        for name, module in extra_states(self._root):
            module.set_extra_state(self.values[name])
        self._write_job(to)

    def written_keys(self) -> list[str]:
        """The keys of the parameters that the checkpoint has values of."""
        names = {target.tensor.name for target in self._targets}
        records = self._state.records.items()
        return [key for key, r in records if parameter_name(r.spec.name) in names]

    def _copy(self, read: _Read, to: Tensor) -> None:
        run = self._files.read_run(read.file, read.stored, read.slab.first, read.slab.shape)
        for dim, ((a, b), first) in enumerate(zip(read.slab.keep, read.slab.to, strict=True)):
            run, to = run.narrow(dim, a, b - a), to.narrow(dim, first, b - a)
        to.copy_(run)

    def _put_buffer(self, old: Tensor, value: Tensor) -> None:
        """Put a buffer in the place, or places, of one that has no memory, or too little."""
        made = value.to(self._state.device.torch)
        for module in self._root.modules():
            for name, buffer in module._buffers.items():
                if buffer is old:
                    module._buffers[name] = made

    def _write_job(self, moments: dict[str, Tensor]) -> None:
        job = self._job
        if job.optimizer is not None:
            specs = {r.spec.name: r.spec for r in self._state.records.values()}
            state = {
                name: {
                    key: self._wrapped(moments[value.name], specs[name])
                    if isinstance(value, Reference)
                    else value
                    for key, value in of_one.items()
                }
                for name, of_one in self.values["optimizer.state"].items()
            }
            groups, others = self.values["optimizer.groups"], self.values["optimizer.others"]
            names = parameter_names(self._root, self._state)
            put_back(job.optimizer, groups, state, others, names)
        for owner, name in ((job.scheduler, "scheduler"), (job.scaler, "scaler")):
            if owner is not None:
                owner.load_state_dict(self.values[name])
        for taker, saved in self._restores:
            taker.load_state_dict(saved)
        if self._continues_rng():
            set_rng_state(self.values["rng"], self._state.device.torch)
        self._warn_of_differing()

    def _continues_rng(self) -> bool:
        # The states of one rank on several would give all of them the same dropout.
        is_alike = "rng" not in self._differing and len(self._record.files) > 1
        return self._is_same_layout or is_alike

    def _wrapped(self, local: Tensor, spec: ParamSpec) -> Tensor:
        """A moment as its parameter: a DTensor where that is one."""
        mesh = self._state.topology.home_mesh
        if mesh is None:
            return local
        shape = torch.Size(spec.layout.shape)
        stride = torch.empty(shape, device="meta").stride()
        placements = placements_of(spec.layout, spec.strategy.home)
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    def _warn_of_differing(self) -> None:
        here = self._state.topology
        if self._differing and here.node == here.place == 0:
            others = [n for n in self._differing if n != "rng" and n in self.values]
            log.warning(
                "%s was saved by %d x %d ranks and is loaded by %d x %d: random number generators go on as "
                "they are%s",
                self._folder,
                self._record.nodes,
                self._record.ranks_per_node,
                here.nodes,
                here.ranks_per_node,
                f", and of {', '.join(others)}, which differed, every rank got rank 0's"
                if others
                else "",
            )


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several elements are the same memory, which cannot be written one by one."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and not stride for size, stride in strides)
