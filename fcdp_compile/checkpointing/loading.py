"""`load(folder, model=…, …)`: continue from what `save` wrote, on this number of nodes and ranks.

    read checkpoint.json -> compare with the model and the optimizer -> verify every byte that is needed
    -> write into the model, the optimizer, …

All ranks hear of each step whether all succeeded; nothing is written before the last.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fcdp_compile.checkpointing.blocks import DataFiles, Stored
from fcdp_compile.checkpointing.boxes import Cut, Slab, slabs
from fcdp_compile.checkpointing.contents import (
    Job,
    extra_states,
    parameter_name,
    parameter_names,
    plain_tensors,
)
from fcdp_compile.checkpointing.cuts import cut
from fcdp_compile.checkpointing.optimizers import check_groups, put_back
from fcdp_compile.checkpointing.progress import Bar, bar, need_bar
from fcdp_compile.checkpointing.record import (
    TORCH_DTYPES,
    CutTensor,
    SavedValue,
    read_record,
)
from fcdp_compile.checkpointing.rng import set_rng_state
from fcdp_compile.checkpointing.saving import end_of_saves
from fcdp_compile.checkpointing.tree import Reference, decode, has_state
from fcdp_compile.checkpointing.writing import in_step
from fcdp_compile.errors import CheckpointError
from fcdp_compile.home_shard import placements_of
from fcdp_compile.registry import ParamSpec
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.sharding import model_of, state_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What `save` was given: the step, and `extra`, of objects with a state the state."""

    step: int | None
    extra: Any


def load(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Any = None,
    progress: bool = False,
) -> Loaded:
    """Load a checkpoint that `save` wrote, from any number of nodes and ranks and any strategy.

        loaded = fcdp_compile.load("checkpoints/last", model=model, optimizer=optimizer, scheduler=scheduler)
        for step in range(loaded.step + 1, steps): …

    All ranks must call it.  Each reads the rows of its home shards and whatever else it needs, all of it
    against checksums, and twice: nothing is written before all that is needed has been proven intact.  So
    a damaged checkpoint changes nothing.

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

    Raises: CheckpointError on every rank, naming the file, the tensors or the groups, if there is no
    checkpoint, or a damaged one, or one of another model or optimizer; FcdpError for a progress bar without
    tqdm; ValueError if the model is not sharded.
    """
    job = Job(optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra)
    state = state_of(model)
    end_of_saves(state)
    loading = _Loading(Path(folder), model_of(model), state, job)
    control, doing = state.topology.control, f"loading from {folder}"
    shows = progress and state.topology.node == state.topology.place == 0

    def look() -> str:
        need_bar(shown=progress)
        return loading.look()

    if len(set(in_step(control, look, doing))) > 1:
        raise CheckpointError(
            f"ranks are about to load different things from {folder}; give the same arguments on every rank, "
            "and a folder that all nodes share"
        )
    with bar("loading", 2 * loading.size_bytes, shown=shows) as shown:
        in_step(control, lambda: loading.verify(shown), doing)
        in_step(control, lambda: loading.write(shown), doing)
    return Loaded(step=loading.values.get("step"), extra=loading.values.get("extra"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A cut tensor and what this rank wants of it."""

    tensor: CutTensor
    spec: ParamSpec
    want: Cut


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
        return self.stored.begin + self.slab.first * self.stored.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of the slab."""
        return torch.Size(self.slab.shape).numel() * self.stored.dtype.itemsize


class _Loading:
    """One load on this rank, step after step."""

    def __init__(self, folder: Path, root: nn.Module, state: ShardedModel, job: Job) -> None:
        self._folder, self._root, self._state, self._job = folder, root, state, job
        self.values: dict[str, Any] = {}
        self.size_bytes = 0
        self._reads: list[_Read] = []

    # --- before anything is written -----------------------------------------------------------------------

    def look(self) -> str:
        """Compare the checkpoint with the job; what must be the same on every rank."""
        self._record = read_record(self._folder)
        self._files = DataFiles(self._folder, self._record)
        here = self._state.topology
        self._is_same_layout = (self._record.nodes, self._record.ranks_per_node) == (
            here.nodes,
            here.ranks_per_node,
        )
        self._cuts = {t.name: t for t in self._record.tensors}
        self._differing: list[str] = []
        saved = self._of_this_rank(here.node * here.ranks_per_node + here.place)
        self._check_model(set(saved))
        self._check_job(set(saved))
        self.values = {v.name: self._decoded(v) for v in self._wanted(saved.values())}
        self._check_plain()
        self._targets = [self._target(s, n) for n, s in self._model_tensors().items()]
        if self._job.optimizer is not None:
            names = parameter_names(self._root)
            check_groups(self._job.optimizer, self.values["optimizer.groups"], names)
            self._targets += self._moments()
        self._restores = list(_restores(self._job.extra, self.values["extra"], "extra"))
        given = [
            v is not None for v in (self._job.optimizer, self._job.scheduler, self._job.scaler)
        ]
        self._reads = sorted(self._plan(), key=lambda read: (read.file, read.start))
        self.size_bytes = sum(read.size_bytes for read in self._reads)
        return hashlib.blake2b(f"load {self._record.checksum} {given}".encode()).hexdigest()

    def verify(self, shown: Bar) -> None:
        """Read everything once."""
        runs = [(r.file, r.start, r.start + r.size_bytes) for r in self._reads]
        self._files.verify(runs, shown.update)

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

    def _model_tensors(self) -> dict[str, ParamSpec]:
        return {parameter_name(r.spec.name): r.spec for r in self._state.records.values()}

    def _check_model(self, values: set[str]) -> None:
        """Compare the names, shapes and dtypes of parameters, and the names of buffers."""
        model = self._model_tensors()
        plain = [*plain_tensors(self._root, self._state), *(n for n, _ in extra_states(self._root))]
        here = {*model, *plain}
        there = {n for n in (*self._cuts, *values) if n.startswith("model.")}
        problems = [f"{n} is missing in it" for n in sorted(here - there)]
        problems += [f"{n} is not in the model" for n in sorted(there - here)]
        for name in sorted(here & there):
            if (name in model) != (name in self._cuts):
                problems.append(f"{name} is sharded in one of them, and ignored in the other")
            elif name in model:
                spec, saved = model[name], self._cuts[name]
                now = (spec.layout.shape, spec.home_dtype)
                if now != (saved.shape, TORCH_DTYPES[saved.dtype]):
                    problems.append(
                        f"{name} is {saved.dtype} {saved.shape} in it, here {now[1]} {now[0]}"
                    )
        self._raise_problems(problems)

    def _check_plain(self) -> None:
        problems = []
        for name, tensor in plain_tensors(self._root, self._state).items():
            saved = self.values[name]
            if not isinstance(saved, Tensor):
                problems.append(f"{name} is no tensor in it")
            elif (saved.dtype, saved.shape) != (tensor.dtype, tensor.shape):
                problems.append(
                    f"{name} is {saved.dtype} {tuple(saved.shape)} in it, here {tensor.dtype} "
                    f"{tuple(tensor.shape)}"
                )
        self._raise_problems(problems)

    def _raise_problems(self, problems: list[str]) -> None:
        if problems:
            shown = "\n  ".join(problems)
            raise CheckpointError(
                f"the checkpoint in {self._folder} is of another model ({len(problems)} differences); build "
                f"the model that was saved:\n  {shown}"
            )

    def _check_job(self, values: set[str]) -> None:
        needed = {"optimizer": "optimizer.groups", "scheduler": "scheduler", "scaler": "scaler"}
        for owner, name in needed.items():
            if getattr(self._job, owner) is not None and name not in values:
                raise CheckpointError(
                    f"the checkpoint in {self._folder} was saved without a {owner}; leave {owner}=… out"
                )

    def _moments(self) -> Iterator[_Target]:
        """The tensors of the optimizer that lie as their parameters do."""
        specs = {r.spec.name: r.spec for r in self._state.records.values()}
        names = {n for g in self.values["optimizer.groups"] for n in g["params"]}
        for parameter, of_one in self.values["optimizer.state"].items():
            if parameter not in names:
                raise CheckpointError(
                    f"{self._folder}: {parameter!r} has a state but is in no group"
                )
            for key, value in of_one.items():
                if not isinstance(value, Reference):
                    self._check_unmoved(parameter, key, value)
                    continue
                saved = self._cuts.get(value.name)
                spec = specs.get(parameter)
                if saved is None or spec is None or saved.shape != spec.layout.shape:
                    raise CheckpointError(
                        f"{self._folder}: {key!r} of parameter {parameter!r} does not lie as that does"
                    )
                yield self._target(spec, value.name)
        if "optimizer.state" in self._differing:
            raise CheckpointError(
                f"the optimizer of {self._folder} kept something for each rank alone, which "
                f"{self._record.nodes} x {self._record.ranks_per_node} ranks can load and no others; load it "
                "there, or without optimizer=…"
            )

    def _check_unmoved(self, parameter: str, key: str, value: Any) -> None:
        """Refuse what an optimizer has made of a rank's rows where the rank has other rows now."""
        saved = self._cuts.get(parameter_name(parameter))
        if saved is None or not isinstance(value, Tensor) or value.numel() < 2:
            return
        spec = self._model_tensors()[parameter_name(parameter)]
        now = cut(saved.name, saved.dtype, spec, self._state.topology.position, 0)
        if not self._is_same_layout or (now.dim, now.rows) != (saved.dim, saved.rows):
            raise CheckpointError(
                f"{self._folder}: the optimizer kept {key!r} of parameter {parameter!r} in a form that only "
                f"the layout that saved it ({self._record.nodes} x {self._record.ranks_per_node}, its "
                "strategy) can load; load it there, or without optimizer=…"
            )

    def _target(self, spec: ParamSpec, name: str) -> _Target:
        layout, home = spec.layout, self._state.topology.home(spec.strategy.home)
        start = layout.local_start(home.node, home.place)
        rows = 0 if layout.dim is None else spec.local_shape[layout.dim]
        want = Cut(dim=layout.dim, start=start, stop=start + rows)
        return _Target(tensor=self._cuts[name], spec=spec, want=want)

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
        """Write what was read into everything, the generators of random numbers last."""
        to = {parameter_name(r.spec.name): r.local() for r in self._state.records.values()}
        device = self._state.device
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
                tensor.detach().copy_(self.values[name])
        self._note_arrival()
        for name, module in extra_states(self._root):
            module.set_extra_state(self.values[name])
        self._write_job(to)

    def _copy(self, read: _Read, to: Tensor) -> None:
        run = self._files.read_run(read.file, read.stored, read.slab.first, read.slab.shape)
        for dim, ((a, b), first) in enumerate(zip(read.slab.keep, read.slab.to, strict=True)):
            run, to = run.narrow(dim, a, b - a), to.narrow(dim, first, b - a)
        to.copy_(run)

    def _note_arrival(self) -> None:
        arrived = getattr(self._state, "values_arrived", None)
        if arrived is None:
            self._state.values_loaded()
            return
        arrived(list(self._state.records))
        getattr(self._state, "awaited_buffers", set()).clear()

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
            put_back(job.optimizer, groups, state, others, parameter_names(self._root))
        for owner, name in ((job.scheduler, "scheduler"), (job.scaler, "scaler")):
            if owner is not None:
                owner.load_state_dict(self.values[name])
        for taker, saved in self._restores:
            taker.load_state_dict(saved)
        if self._continues_rng():
            set_rng_state(self.values["rng"], self._state.device)
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


def _restores(given: Any, saved: Any, path: str) -> Iterator[tuple[Any, Any]]:
    """Each object of a tree that takes a state, with its state.

    Raises: CheckpointError where the tree that was saved has none.
    """
    if has_state(given):
        yield given, saved
    elif isinstance(given, dict):
        for key, item in given.items():
            found = saved.get(key, _restores) if isinstance(saved, dict) else _restores
            if found is not _restores:
                yield from _restores(item, found, f"{path}[{key!r}]")
            elif any(True for _ in _restores(item, item, path)):
                raise CheckpointError(f"the checkpoint has no {path}[{key!r}] to load")
    elif isinstance(given, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(given):
            raise CheckpointError(f"the checkpoint has no {path} of {len(given)} items to load")
        for i, (item, found) in enumerate(zip(given, saved, strict=True)):
            yield from _restores(item, found, f"{path}[{i}]")
