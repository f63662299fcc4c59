"""`save(folder, model=…, …)`: a checkpoint of a whole job, on request while training goes on.

All ranks' parts become one new checkpoint, or the old one stays and every rank raises an error:

    every rank sees rank 0's folder -> each rank's file is on the disk -> rank 0 names them in the record

After each step all ranks learn whether every rank succeeded (`together`); no rank goes on alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fcdp_compile.core.params.mesh import Topology, new_control_group
from fcdp_compile.core.ranks.messages import first_other, together
from fcdp_compile.core.sharding.folder_argument import refuse_nameless, refuse_swapped
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.devices import Device
from fcdp_compile.errors import CheckpointError
from fcdp_compile.extras import require
from fcdp_compile.models.checkpointing.contents import (
    HostCopies,
    JobContents,
    JobObjects,
    Marking,
    contents_of,
    mark_of_all,
)
from fcdp_compile.models.checkpointing.format.disk import Disk
from fcdp_compile.models.checkpointing.format.record import (
    BLOCK_BYTES,
    CheckpointRecord,
    DataFile,
    LeftOut,
    SavedValue,
    folder_of,
    seal,
)
from fcdp_compile.models.files.text_diff import text_diff
from fcdp_compile.runtime.model import ShardedModel

log = logging.getLogger(__name__)

T = TypeVar("T")


class PendingSave:
    """A save that may still be running."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether the save has ended on this rank, in success or failure."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the save has ended on this rank.

        Raises: the error with which it failed; if it failed on one rank, every rank raises an error.
        """
        self.end()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Wait until the save has ended, in success or failure."""
        if self._thread is not None:
            self._thread.join()

    def _start(self, run: Callable[[], None], *, tells: bool) -> None:
        def act() -> None:
            try:
                run()
            except BaseException as error:
                self._error = error
                if tells:
                    log.error("an asynchronous save has failed: %s", error)

        # Not a daemon: the interpreter waits for the thread before it exits.
        self._thread = threading.Thread(target=act, name="fcdp-save", daemon=False)
        self._thread.start()


class _Saver:
    """A model's last save, and the process group and host memory of its asynchronous saves."""

    def __init__(self, device: Device) -> None:
        self.pending = PendingSave()
        self.copies = HostCopies(device)
        self._group: dist.ProcessGroup | None = None

    def group(self, topology: Topology) -> dist.ProcessGroup | None:
        """Return a group for saves alone; the first call makes it, with all ranks of the mesh."""
        if self._group is None:
            self._group = new_control_group(topology)
        return self._group


_savers: weakref.WeakKeyDictionary[ShardedModel, _Saver] = weakref.WeakKeyDictionary()
"""By model; an entry goes with its model."""


def end_of_saves(state: ShardedModel) -> None:
    """Wait for the model's save if one is running."""
    if state in _savers:
        _savers[state].pending.end()


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    step: int | None = None,
    extra: Any = None,
    frozen: bool = True,
    asynchronous: bool = False,
    progress: bool = False,
) -> PendingSave:
    """Save a job such that `load` continues it, on this or any other number of nodes and ranks (and of "tp").

        fcdp_compile.save("checkpoints/last", model=model, optimizer=optimizer, step=step)

    All ranks must call it at the same step, after `optimizer.step()`: gradients are not saved.  Every rank
    writes its part of parameters and optimizer to a file of its own in `folder`, which all ranks must share.
    `folder` holds one checkpoint: the last that was saved completely.  A save that fails or is killed leaves
    the previous checkpoint in place; the next save removes its remains.  No two jobs may save to one folder.

    Besides parameters, persistent buffers and the optimizer, the checkpoint holds the states of each rank's
    random number generators (torch, the model's GPU, Python, numpy).  A value that is equal on all ranks is
    written once; a value that differs, such as those states, is written for each rank.

    model: sharded, compiled or not.
    scheduler, scaler: anything with `state_dict` and `load_state_dict`.
    step: the number of the current step; `load` returns it.
    extra: a tree of dicts, lists, tuples, strings, numbers, None and tensors, and of objects with
    `state_dict` and `load_state_dict`, such as a data loader that knows its position.  Ranks may differ.
    frozen: False leaves out the values of frozen parameters, such as those of a base model under adapters;
    the job must then load them from their source again.  The checkpoint keeps a mark of each, by which `load`
    makes sure that the model has the same values.
    asynchronous: return once everything is copied to host memory; a thread writes the copies, so later steps
    do not change the checkpoint.  The next `save` or `load` of the model waits for the thread, and so does
    the end of the interpreter; call `wait` before `destroy_process_group`.  The memory of the copies is kept
    for the next asynchronous save: as much as this rank writes.
    progress: show a bar on rank 0, of its own file.

    Returns: a handle to wait on; a synchronous save has ended already.

    Raises: ArgumentError if folder and model are swapped.  On every rank, CheckpointError if something cannot
    be saved or written, ranks would save different things, or gradients that `no_sync` accumulated wait;
    FcdpError if parameters lack values so far, or for a progress bar without tqdm; LostRankError if a rank
    does not take part; ValueError if the model is not sharded.  If an asynchronous write fails, `wait` raises
    the error, and it is logged.
    """
    refuse_swapped(folder, model, "save(folder, model)")
    job = JobObjects(optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=extra)
    return save_on(
        Disk(),
        folder,
        model,
        job,
        step,
        frozen=frozen,
        asynchronous=asynchronous,
        progress=progress,
    )


def save_on(
    disk: Disk,
    folder: str | os.PathLike[str],
    model: nn.Module,
    job: JobObjects,
    step: int | None,
    *,
    frozen: bool = True,
    mark: Marking | None = None,
    asynchronous: bool = False,
    progress: bool = False,
) -> PendingSave:
    """Do as `save`, on a given disk.  mark: what tells other values of the parameters that are left out."""
    path = Path(folder).absolute()  # a thread may write after the working directory has changed
    root, state = model_of(model), state_of(model)
    if state not in _savers:
        _savers[state] = _Saver(state.device)
    saver = _savers[state]
    saver.pending.end()
    state.unset.refuse("a checkpoint")
    _refuse_waiting_gradients(state)
    found: list[JobContents] = []

    def look() -> tuple[str, str]:
        refuse_nameless(folder)
        need_bar(shown=progress)
        if state.accumulation.is_on:
            raise CheckpointError(
                "save within fcdp_compile.no_sync would lose the gradients that accumulate; save after "
                "optimizer.step()"
            )
        if step is not None and type(step) is not int:
            raise CheckpointError(f"step must be a whole number, not {step!r}")
        refuse_whole(state)
        copies = saver.copies if asynchronous else None
        found.append(contents_of(state, root, job, step, copies, frozen=frozen, mark=mark))
        text = _text(found[0], step, asynchronous=asynchronous)
        return hashlib.sha256(text.encode()).hexdigest(), secrets.token_hex(8)

    everyone = state.topology.everyone
    looks = together(everyone, look, CheckpointError, f"saving to {path}")
    (contents,) = found
    if first_other([digest for digest, _ in looks]):
        _raise_difference(state, _text(contents, step, asynchronous=asynchronous))
    pending, topology = PendingSave(), state.topology
    group = saver.group(topology) if asynchronous else everyone
    write = _Write(contents, looks[0][1], path, topology, group, disk, progress)
    if asynchronous:
        saver.pending = pending
        pending._start(write.run, tells=topology.number == 0)
    else:
        write.run()
    return pending


def _text(contents: JobContents, step: int | None, *, asynchronous: bool) -> str:
    return "\n".join([f"save, {asynchronous=}, {step=}", *contents.description()])


def _raise_difference(state: ShardedModel, text: str) -> None:
    texts = state.collectives.exchange_texts(text, state.topology.everyone)
    other = first_other(texts)
    assert other is not None, "the digests of the texts differ"
    names = ("rank 0", f"rank {other}")
    shown = "\n  ".join(text_diff(texts[0], texts[other], names, most=12))
    raise CheckpointError(
        f"ranks 0 and {other} are about to save different things; give the same model, optimizer and "
        f"arguments on every rank. The differences:\n  {shown}"
    )


def refuse_whole(state: ShardedModel) -> None:
    """Raise CheckpointError within `gathered`, where parameters are not the home shards."""
    if state.whole:
        raise CheckpointError(
            f"parameter {state.spec(next(iter(state.whole))).name!r} is whole; save and load outside of the "
            "block of fcdp_compile.gathered"
        )


def _refuse_waiting_gradients(state: ShardedModel) -> None:
    # All ranks have the same names, so either all ranks call `settle` or none does.
    if state.accumulation.concerns() and (left := state.accumulation.settle()):
        raise CheckpointError(
            f"gradients of parameter {left[0]!r} (one of {len(left)}) were accumulated within "
            "fcdp_compile.no_sync and wait; they would be lost, so save after optimizer.step()"
        )


# --- writing ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """One rank's file, and the values whose tensors are in it.

    left_out: the parameters that were left out; each mark is this rank's part of the mark.
    """

    file: DataFile
    left_out: list[LeftOut]
    values: list[SavedValue]


@dataclass(frozen=True, slots=True)
class _Write:
    """One save: its contents, its id, its folder, the ranks that save and a group of them all."""

    contents: JobContents
    id: str
    folder: Path
    topology: Topology
    group: dist.ProcessGroup | None
    disk: Disk
    progress: bool

    def run(self) -> None:
        """_Write, with all ranks of the group.

        Raises: CheckpointError on every rank if one fails; the folder then still has its previous checkpoint.
        """
        leads = self.disk.leads(self.topology)
        try:
            self._step(lambda: self._begin() if leads else None)
            digests = self._step(self._look)
            names = list(self.contents.values)
            alike = {n for i, n in enumerate(names) if len({d[i] for d in digests}) == 1}
            written = self._step(lambda: self._write(alike))
            files = [w.file for w in written]
            self.disk.spread(self.folder / folder_of(self.id), files, self.topology, self.group)
            self._step(lambda: self._decide(written) if leads else None)
        except BaseException:
            if leads:
                self.disk.take_back(self.folder, self.id)
            raise
        # All ranks wait for the sweep, so that the folder holds one checkpoint when `run` returns.
        self._step(lambda: self.disk.sweep(self.folder) if leads else None)

    @property
    def _is_first(self) -> bool:
        return self.topology.number == 0

    def _step(self, act: Callable[[], T]) -> list[T]:
        """Call `act` on every rank; return the results in the mesh's order, which may not be the group's."""
        doing = f"saving to {self.folder}"
        everyone = together(
            self.group, lambda: (self.topology.number, act()), CheckpointError, doing
        )
        return [value for _, value in sorted(everyone, key=lambda given: given[0])]

    def _begin(self) -> None:
        try:
            self.disk.make_folders(self.folder, self.id)
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error.strerror}") from error
        self.disk.sweep(self.folder, new=folder_of(self.id))

    def _look(self) -> list[str]:
        if not (self.folder / folder_of(self.id)).is_dir():
            raise CheckpointError(
                f"{self.folder} is another folder on this rank than on rank 0; save to a folder that "
                "all nodes share"
            )
        return [value.digest() for value in self.contents.values.values()]

    def _write(self, alike: set[str]) -> _Written:
        rank = self.topology.number
        mine = [
            SavedValue(name=name, rank=None if name in alike else rank, tree=value.tree)
            for name, value in self.contents.values.items()
            if self._is_first or name not in alike
        ]
        tensors = dict(self.contents.parts)
        for value in mine:
            tensors |= self.contents.values[value.name].tensors
        total_bytes = sum(tensor.nbytes for tensor in tensors.values())
        folder, shown = self.folder / folder_of(self.id), self.progress and self._is_first
        try:
            with bar("saving", total_bytes, shown=shown) as update:
                file = self.disk.write_data(folder, rank, tensors, update)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {folder}: {error.strerror}; {self.folder} has the checkpoint that it had"
            ) from error
        return _Written(file=file, left_out=self.contents.left_out, values=mine)

    def _decide(self, written: list[_Written]) -> None:
        record = CheckpointRecord(
            checksum="",
            id=self.id,
            nodes=self.topology.nodes,
            ranks_per_node=self.topology.ranks_per_node,
            block_bytes=BLOCK_BYTES,
            files=tuple(w.file for w in written),
            tensors=tuple(self.contents.tensors),
            left_out=tuple(
                replace(parts[0], mark=mark_of_all(part.mark for part in parts))
                for parts in zip(*(w.left_out for w in written), strict=True)
            ),
            values=tuple(value for w in written for value in w.values),
            tp=self.topology.sharers,
        )
        try:
            self.disk.put_record(self.folder, seal(record))
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error.strerror}") from error


def need_bar(*, shown: bool) -> None:
    """Make sure that a bar can be shown, if one is to be.

    Raises: MissingExtraError if tqdm is not installed.
    """
    if shown:
        require("tqdm", "progress=True")


@contextmanager
def bar(text: str, total_bytes: int, *, shown: bool) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr until the block ends, if `shown`; yields what counts more bytes."""
    if not shown:
        yield lambda count: None
        return
    tqdm = require("tqdm", "progress=True").tqdm
    with tqdm(desc=text, total=total_bytes, unit="B", unit_scale=True, unit_divisor=1024) as made:
        yield made.update
