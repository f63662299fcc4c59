"""`save(folder, model=…, …)`: a checkpoint of a whole job, on request while training goes on."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fcdp_compile.checkpointing.contents import HostCopies, JobContents, JobObjects, contents_of
from fcdp_compile.checkpointing.format.disk import Disk
from fcdp_compile.checkpointing.progress import need_bar
from fcdp_compile.checkpointing.writing import Write
from fcdp_compile.errors import CheckpointError
from fcdp_compile.files.text_diff import text_diff
from fcdp_compile.params.mesh import Topology, new_control_group
from fcdp_compile.ranks.all_or_none import together
from fcdp_compile.ranks.differences import first_other
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.sharding.folder_argument import refuse_nameless, refuse_swapped
from fcdp_compile.sharding.shard import model_of, state_of

log = logging.getLogger(__name__)


class PendingSave:
    """A save that may be under way."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it has ended on this rank, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for its end on this rank.

        Raises: what has failed; if anything has on one rank, then something on every rank.
        """
        self.end()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Wait for its end, whether well or not."""
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

        # Not a daemon: the interpreter waits for it before it exits.
        self._thread = threading.Thread(target=act, name="fcdp-save", daemon=False)
        self._thread.start()


class _Saver:
    """Of one model: the last save; of asynchronous ones the group that they agree in, and their memory."""

    def __init__(self) -> None:
        self.pending = PendingSave()
        self.copies = HostCopies()
        self._group: dist.ProcessGroup | None = None

    def group(self, topology: Topology) -> dist.ProcessGroup | None:
        """A group that nobody else uses; made the first time, with all ranks of the mesh."""
        if self._group is None:
            self._group = new_control_group(topology)
        return self._group


_savers: weakref.WeakKeyDictionary[ShardedModel, _Saver] = weakref.WeakKeyDictionary()
"""By the model, as long as that lives."""


def end_of_saves(state: ShardedModel) -> None:
    """Wait for the save of a model that is under way, if one is."""
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
    """Save a job such that `load` continues it, on this or any other number of nodes and ranks.

        fcdp_compile.save("checkpoints/last", model=model, optimizer=optimizer, step=step)

    All ranks must call it, at the same step; after `optimizer.step()`, as gradients are not saved.  Every
    rank writes its part of parameters and optimizer to a file of its own in `folder`, which all of them must
    share.  `folder` holds one checkpoint: the last that was saved whole.  A save that fails or is killed
    leaves the one before; its remains go with the next save.  No two jobs may save to one folder.

    Besides parameters, persistent buffers and the optimizer it holds the states of the random number
    generators of each rank (torch, the model's GPU, Python, numpy).  What every rank has alike is written
    once, what differs, such as those, for each rank.

    model: sharded, compiled or not.
    scheduler, scaler: anything with `state_dict` and `load_state_dict`.
    step: how far the job is; `load` gives it back.
    extra: a tree of dicts, lists, tuples, strings, numbers, None and tensors, and of objects with
    `state_dict` and `load_state_dict`, such as a data loader that knows its position.  Ranks may differ.
    frozen: False leaves the values of frozen parameters out, such as those of a base model under adapters,
    which the job gets from where it got them.  What is kept of them is a mark by which `load` makes sure that
    the model has the same ones.
    asynchronous: return once everything is copied to host memory; a thread writes the copies, and what the
    step after changes is not in the checkpoint.  The next `save` or `load` of the model waits for it, and so
    does the end of the interpreter; call `wait` before `destroy_process_group`.  The memory of the copies is
    kept for the next asynchronous save: as much as this rank writes.
    progress: show a bar on rank 0, of its own file.

    Returns: what waits for the end; in a synchronous save that has come.

    Raises: ArgumentError if folder and model are swapped.
    On every rank, CheckpointError if something cannot be saved or written, ranks would save
    different things, or gradients that `no_sync` accumulated wait; FcdpError if parameters lack values
    so far, or for a progress bar without tqdm; LostRankError if a rank does not come; ValueError if the
    model is not sharded.  What fails in the writing of an asynchronous save is raised by `wait`, and logged.
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
    asynchronous: bool = False,
    progress: bool = False,
) -> PendingSave:
    """`save` to a disk that may be watched."""
    path = Path(folder).absolute()  # a thread may write when the process works elsewhere
    root, state = model_of(model), state_of(model)
    saver = _savers.setdefault(state, _Saver())
    saver.pending.end()
    state.unset.refuse("a checkpoint")
    _refuse_waiting_gradients(state)
    found: list[JobContents] = []

    def look() -> str:
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
        found.append(contents_of(state, root, job, step, copies, frozen=frozen))
        return digest_of(_lines(found[0], step, asynchronous=asynchronous))

    control = state.topology.control
    digests = together(control, look, CheckpointError, f"saving to {path}")
    (contents,) = found
    if first_other(digests):
        _raise_difference(state, _lines(contents, step, asynchronous=asynchronous))
    pending = PendingSave()
    mesh = state.topology.position
    group = saver.group(state.topology) if asynchronous else control
    write = Write(
        contents=contents, folder=path, mesh=mesh, group=group, disk=disk, progress=progress
    )
    if asynchronous:
        saver.pending = pending
        pending._start(write.run, tells=mesh.rank == 0)
    else:
        write.run()
    return pending


def digest_of(lines: list[str]) -> str:
    """The same for ranks that are about to do the same."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _lines(contents: JobContents, step: int | None, *, asynchronous: bool) -> list[str]:
    return [f"save, {asynchronous=}, {step=}", *contents.description()]


def _raise_difference(state: ShardedModel, lines: list[str]) -> None:
    texts = state.collectives.exchange_texts("\n".join(lines))
    other = first_other(texts)
    assert other is not None, "the digests of the texts differ"
    names = ("rank 0", f"rank {other}")
    shown = "\n  ".join(text_diff(texts[0], texts[other], names, most=12))
    raise CheckpointError(
        f"ranks 0 and {other} are about to save different things; give the same model, optimizer and "
        f"arguments on every rank:\n  {shown}"
    )


def refuse_whole(state: ShardedModel) -> None:
    """Raise CheckpointError within `gathered`, where parameters are not the home shards."""
    if state.whole:
        raise CheckpointError(
            f"parameter {state.spec(next(iter(state.whole))).name!r} is whole; save and load outside of the "
            "block of fcdp_compile.gathered"
        )


def _refuse_waiting_gradients(state: ShardedModel) -> None:
    # Ranks have the same names, so all of them ask or none.
    if state.accumulation.concerns() and (left := state.accumulation.settle()):
        raise CheckpointError(
            f"gradients of parameter {left[0]!r} (one of {len(left)}) were accumulated under "
            "fcdp_compile.no_sync and wait; they would be lost, so save after optimizer.step()"
        )
