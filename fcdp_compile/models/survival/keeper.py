"""`survive(model, optimizer)`: a job that loses a process or a node goes on from the memory of the nodes.

    memory of a node   all frozen parameters; the state of its own ranks, and of those of the node before
    restart            agree on the newest whole step, bring files to the nodes that lack them, load

Files have the format of checkpoints (`models.checkpointing`), so any number of nodes can go on.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fcdp_compile.cluster.node_memory import NodeMemory, job_name, machine_mark, memory_root
from fcdp_compile.core.params.mesh import Topology, everyone_ranks
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.ranks.inner_mesh import PP
from fcdp_compile.core.ranks.messages import first_other, together
from fcdp_compile.core.sharding.shard import mesh_of, model_of, state_of
from fcdp_compile.errors import ArgumentError, CheckpointError, FcdpError
from fcdp_compile.models.checkpointing.contents import JobObjects
from fcdp_compile.models.checkpointing.format.record import read_record
from fcdp_compile.models.checkpointing.format.tree import decode
from fcdp_compile.models.checkpointing.loading import HalfLoadedError, load_from, needed_files
from fcdp_compile.models.checkpointing.saving import PendingSave, save_on
from fcdp_compile.models.survival.exchange import send_files
from fcdp_compile.models.survival.frozen import KeptFrozen, frozen_records, keep_frozen
from fcdp_compile.models.survival.states import (
    FROZEN,
    OF_FROZEN,
    STEPS,
    Found,
    Kept,
    NeighboursMemory,
    kept_in,
)
from fcdp_compile.runtime.model import ShardedModel

log = logging.getLogger(__name__)

_EXTRA = "extra"
_DOING = "looking for a step in the nodes' memory"


def survive(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    base: Callable[[], object] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    every: int = 1,
    job: str | None = None,
) -> Keeper:
    """Keep a job's state in the memory of its nodes, and go on from there after a restart.

        base = lambda: fcdp_compile.load_pretrained(model, folder)
        keeper = fcdp_compile.survive(model, optimizer, base=base)
        for step in range(keeper.step, steps):
            ...
            optimizer.step(); optimizer.zero_grad()
            keeper.commit()
        keeper.close()

    All ranks must call it, after `shard` and once the optimizer is built.  If the job was killed, its newest
    step that the nodes have between them comes back: parameters, buffers, optimizer, scheduler, scaler and
    random number generators, as with `fcdp_compile.load`.  Frozen parameters come from the node's own memory;
    a node that lacks them gets them from another node.  The number of nodes may be another than before.

    Each node keeps all frozen parameters, and two copies of the state of its own ranks and of those of the
    node before (with AdamW, 12 bytes for each trained parameter in fp32).  So one node may be lost at a time.
    FCDP_NODE_MEMORY names the folder in memory, if not /dev/shm.

    base: gives the model its first values, called only if the nodes' memory has no step of this job.  If it
    loads a checkpoint, it returns how many steps the checkpoint's job had done.  None: the model has its
    values already.
    scheduler, scaler: as for `save`.
    every: after how many calls of `commit` the state is copied.
    job: names the job, the same after a restart, and different from other jobs; by default torchrun's
    --rdzv-id, or SLURM's job id.  Another model of the same job needs another name.

    Raises: ArgumentError on every rank if the job has no id, if it runs already, or for a wrong argument;
    CheckpointError on every rank if the memory is that of another model; ValueError if the model is not
    sharded.
    """
    keeper = open_keeper(model, every=every, job=job, base=base)
    objects = JobObjects(optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=None)
    try:
        keeper.begin(objects, base)
    except BaseException:
        keeper.release()
        raise
    return keeper


def open_keeper(
    model: nn.Module, *, every: int, job: str | None, base: Callable[[], object] | None = None
) -> Keeper:
    """Do the first half of `survive`: look at what the nodes have.  `Keeper.begin` does the rest."""
    root, state = model_of(model), state_of(model)

    def check() -> tuple[tuple[object, ...], str, str]:
        if type(every) is not int or every < 1:
            raise ArgumentError(f"every must be a whole number above 0, not {every!r}")
        if base is not None and not callable(base):
            raise ArgumentError(f"base must be a function without arguments, not {base!r}")
        mesh = mesh_of(model)
        if job is None and mesh is not None and PP in (mesh.mesh_dim_names or ()):
            raise ArgumentError(
                "the stages of a pipeline keep their states apart; give survive job=f'{id}-{stage}'"
            )
        root_folder = memory_root()
        same = (job_name(job), every, base is not None)
        return same, machine_mark(root_folder), secrets.token_hex(4)

    topology = state.topology
    told = together(topology.everyone, check, ArgumentError, _DOING)
    if (other := first_other([same for same, _, _ in told])) is not None:
        names = ("job", "every", "base is given")
        differing = [
            f"{name} is {a!r} on rank 0 and {b!r} on rank {other}"
            for name, a, b in zip(names, told[0][0], told[other][0], strict=True)
            if a != b
        ]
        raise ArgumentError(
            f"survive gets different arguments: {'; '.join(differing)}; give the same on every rank"
        )
    name = str(told[0][0][0])
    memory = NodeMemory(memory_root(), name, _number_on_machine(topology, [m for _, m, _ in told]))
    leads = NeighboursMemory(memory.folder).leads(topology)
    try:
        together(topology.everyone, lambda: memory.hold(owns=leads), ArgumentError, _DOING)
        return Keeper(root, state, memory, every, told[0][2])
    except BaseException:
        memory.release()
        raise


def _number_on_machine(topology: Topology, marks: list[str]) -> int:
    """The number of this rank's node among the nodes whose ranks see the same memory.

    marks: `machine_mark` of each rank, by rank of `Topology.everyone`.
    """
    ranks = everyone_ranks(topology)
    of_nodes = [marks[ranks[node, 0, 0]] for node in range(topology.nodes)]
    for (node, place, index), rank in ranks.items():
        if marks[rank] != of_nodes[node]:
            raise ArgumentError(
                f"the ranks of node {node} do not share their memory, as place {place} of it ({index}) is on "
                "another machine; make the mesh with one node for each machine"
            )
    return of_nodes[: topology.node].count(of_nodes[topology.node])


class Keeper:
    """Keeps the state of a job in the memory of its nodes (`survive`).

    step: how many steps are done.  extra: what `commit` was given at that step; None after a fresh start.
    seconds: how long this start took for parts of its work, by name.
    """

    def __init__(
        self, root: nn.Module, state: ShardedModel, memory: NodeMemory, every: int, start: str
    ) -> None:
        self.step = 0
        self.extra: Any = None
        self.seconds: dict[str, float] = {}
        self._root, self._state = root, state
        self._memory, self._every, self._start = memory, every, start
        self._objects = JobObjects(optimizer=None, scheduler=None, scaler=None, extra=None)
        self._disk = NeighboursMemory(memory.folder)
        self._frozen: _KeptFrozen | None = None
        self._pending = PendingSave()
        self._newest: Path | None = None  # the folder of the newest step that is whole
        self._writing: Path | None = None
        self._of_newest: Path | None = None  # the folder of its frozen parameters
        self._is_open = True
        self._here: list[Kept] = []  # on this node, before this start
        with _Timed(self.seconds, "look"):
            self._found = self._look()

    def _look(self, *, verifies: bool = False) -> Found:
        """Learn what all nodes have.  verifies: whether to read all of it."""
        topology = self._state.topology
        leads = self._disk.leads(topology)

        def look() -> list[Kept]:
            return kept_in(self._memory.folder, verifies=verifies) if leads else []

        everyone = together(topology.everyone, look, CheckpointError, _DOING)
        ranks = everyone_ranks(topology)
        nodes = [everyone[ranks[node, 0, 0]] for node in range(topology.nodes)]
        self._here = nodes[topology.node]
        return Found(nodes)

    def peek(self) -> Any:
        """What `commit` got as `extra` at the newest step; None without a step.  All ranks must call it."""
        if not self._found.steps:
            return None
        newest, _ = self._found.steps[0]

        def look() -> Any:
            try:
                record = read_record(self._memory.folder / newest.folder)
            except CheckpointError:
                return None
            if record.checksum != newest.checksum:
                return None
            return next(v.tree for v in record.values if v.name == "extra" and not v.rank)

        everyone = together(self._state.topology.everyone, look, CheckpointError, _DOING)
        found = next(tree for tree in everyone if tree is not None)
        return decode(found, _no_tensors, "extra")[_EXTRA]

    def begin(self, objects: JobObjects, base: Callable[[], object] | None) -> None:
        """Load the newest step, or else call `base`; `commit` then keeps these objects."""
        self._objects = objects
        if not self._restore() and base is not None:
            with _Timed(self.seconds, "base"):
                done = base()
            if type(done) is int:
                self.step = done

    # --- each step ------------------------------------------------------------------------------------------

    def commit(self, extra: Any = None) -> None:
        """Note that a step is done; every `every`-th time, copy the state to the nodes' memory.

        All ranks must call it after `optimizer.step()`.  Copies to host memory are made at once; a thread
        writes them and sends them to the next node, while training goes on.  The first copy takes longer,
        because it includes the frozen parameters; so does a copy after a change of these.

        extra: as for `save`, such as the position in the data; `extra` of the keeper after a restart.

        Raises: as `save`; also, on every rank, why the copy before has failed.
        """
        if not self._is_open:
            raise FcdpError("the keeper is closed; commit before close, or call survive again")
        step = self.step + 1
        if step % self._every == 0:
            self._keep(step, extra)
        self.step = step

    def _keep(self, step: int, extra: Any) -> None:
        pending, self._pending = self._pending, PendingSave()
        pending.wait()
        self._newest, self._writing = self._writing or self._newest, None
        self._keep_frozen()
        assert self._frozen is not None, "they were kept just now"
        self._sweep()
        objects = JobObjects(
            optimizer=self._objects.optimizer,
            scheduler=self._objects.scheduler,
            scaler=self._objects.scaler,
            extra={OF_FROZEN: self._frozen.checksum, _EXTRA: extra},
        )
        folder = self._memory.folder / STEPS / f"{step}-{self._start}"
        self._pending = save_on(
            self._disk,
            folder,
            self._root,
            objects,
            step,
            frozen=False,
            mark=self._frozen.mark,
            asynchronous=True,
        )
        self._writing = folder

    def _keep_frozen(self) -> None:
        """Keep frozen parameters, unless they are those that are kept, with the same values."""
        state, kept = self._state, self._frozen
        seen = _seen(state)
        changed = together(
            state.topology.everyone,
            lambda: kept is None or kept.seen != seen,
            doing="the agreement on frozen parameters that have changed",
        )
        if any(changed):
            memory = self._memory.folder / FROZEN
            folder, checksum = keep_frozen(self._root, state, memory, self._disk)
            self._frozen = _KeptFrozen(folder, checksum, _seen(state))

    def _sweep(self) -> None:
        """Remove what is older than the newest step, and frozen parameters that no step here needs.

        What an earlier start has kept of a later step stays: with nodes that are yet to come it may be whole.
        """
        if not self._disk.leads(self._state.topology):
            return
        assert self._frozen is not None, "they are kept"
        memory = self._memory.folder
        later = [kept for kept in self._here if kept.step > self.step]
        frozen = {kept.frozen for kept in later}
        later += [kept for kept in self._here if kept.checksum in frozen]
        needed = {self._newest, self._frozen.folder, self._of_newest}
        needed |= {memory / kept.folder for kept in later}
        for folder in memory.glob("*/*"):
            if folder not in needed and folder.is_dir():
                shutil.rmtree(folder, ignore_errors=True)
        self._of_newest = self._frozen.folder

    # --- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the job's memory: the job has ended and needs no state.  All ranks must call it."""
        self._pending.end()
        everyone, leads = self._state.topology.everyone, self._disk.leads(self._state.topology)
        for act in (self.release, lambda: self._memory.remove() if leads else None):
            together(everyone, act, doing="closing a keeper")

    def release(self) -> None:
        """Keep no more steps, and leave the memory as it is."""
        self._is_open = False
        self._memory.release()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.release()

    # --- after a restart ------------------------------------------------------------------------------------

    def _restore(self) -> bool:
        """Load the newest step that the nodes have between them; return whether there is one.

        If that fails, all files are verified, and those that are damaged on one node are taken from another.
        """
        if not self._found.steps:
            if self._found.is_any:
                self._warn(
                    "have no whole step: nodes are gone, or all were killed in the first copy; the job "
                    "starts from its first values"
                )
            return False
        problem: CheckpointError | None = None
        for verifies in (False, True):
            if verifies:
                with _Timed(self.seconds, "verify"):
                    self._found = self._look(verifies=True)
            for step in self._found.steps:
                try:
                    return self._load(*step)
                except HalfLoadedError:
                    raise
                except CheckpointError as error:
                    if verifies:  # nothing is damaged
                        raise CheckpointError(
                            f"the memory of job {self._memory.job!r} does not fit this job: {error}; start "
                            f"the job with another id, or call `fcdp clean {self._memory.job}` on every node"
                        ) from error
                    problem = error
        self._warn(f"are damaged, and the job starts from its first values: {problem}")
        return False

    def _warn(self, what: str) -> None:
        if self._state.topology.number == 0:
            log.warning("the copies of job %s in the nodes' memory %s", self._memory.job, what)

    def _load(self, kept: Kept, frozen: Kept) -> bool:
        """Load a step and its frozen parameters."""
        memory, state = self._memory.folder, self._state
        with _Timed(self.seconds, "fetch frozen"):
            files = range(len(frozen.sizes))
            self._fetch(frozen, dict.fromkeys(range(state.topology.nodes), files))
        with _Timed(self.seconds, "read frozen"):
            self._read_frozen(memory / frozen.folder)
        marking = _KeptFrozen(memory / frozen.folder, frozen.checksum, None)
        folder = memory / kept.folder
        with _Timed(self.seconds, "fetch step"):
            self._fetch_step(kept, marking)
        with _Timed(self.seconds, "read step"):
            loaded = load_from(folder, self._root, self._objects, marking.mark)
        self._frozen = _KeptFrozen(marking.folder, frozen.checksum, _seen(state))
        self.step, self.extra = loaded.step or 0, loaded.extra[_EXTRA]
        self._newest, self._of_newest = folder, marking.folder
        if state.topology.number == 0:
            log.warning(
                "job %s goes on after step %d, from the memory of its nodes (%s)",
                self._memory.job,
                self.step,
                ", ".join(f"{name} {s:.1f} s" for name, s in self.seconds.items()),
            )
        return True

    def _read_frozen(self, folder: Path) -> None:
        everyone = self._state.topology.everyone
        opened: list[KeptFrozen] = []

        def check() -> None:
            opened.append(KeptFrozen(self._root, folder))
            opened[0].check()

        together(everyone, check, CheckpointError, _DOING)
        (frozen,) = opened
        keys = together(everyone, frozen.fill, CheckpointError, _DOING)[0]
        self._state.validity.values_arrived(keys)
        self._state.transport.row_sources.offer(keys, frozen)

    def _fetch_step(self, kept: Kept, marking: _KeptFrozen) -> None:
        """Bring each node the files of a step that its ranks read."""
        topology, folder = self._state.topology, self._memory.folder / kept.folder
        nodes, per_node = range(topology.nodes), topology.ranks_per_node * topology.sharers
        is_same = kept.layout == (topology.nodes, topology.ranks_per_node, topology.sharers)
        first = {
            n: {0, *(range(n * per_node, (n + 1) * per_node) if is_same else ())} for n in nodes
        }
        self._fetch(kept, first)
        # With these, a rank knows which other files have rows that it reads.
        look = partial(needed_files, folder, self._root, self._objects, marking.mark)
        needed = together(topology.everyone, look, CheckpointError, _DOING)
        of_nodes = self._ranks_of_nodes()
        rest = {n: set().union(*(needed[rank] for rank in of_nodes[n])) - first[n] for n in nodes}
        self._fetch(kept, rest)

    def _fetch(self, kept: Kept, wanted: Mapping[int, Iterable[int]]) -> None:
        """Bring files to the nodes that lack them.  wanted: the ranks whose files each node wants."""
        sent = self._found.missing(kept, wanted, self._ranks_of_nodes())
        everyone = self._state.topology.everyone
        send_files(sent, self._memory.folder, everyone, "bringing a node what it lacks")

    def _ranks_of_nodes(self) -> dict[int, list[int]]:
        ranks = everyone_ranks(self._state.topology)
        return {
            node: [rank for (n, _, _), rank in sorted(ranks.items()) if n == node]
            for node in range(self._state.topology.nodes)
        }


@dataclass(frozen=True, slots=True)
class _KeptFrozen:
    """The frozen parameters in the memory of the nodes.

    folder: on this node.  seen: `_seen` when they were kept.
    """

    folder: Path
    checksum: str
    seen: object

    def mark(self, state: ShardedModel, index: int, spec: ParamSpec, local: Tensor) -> int:
        """This rank's part of the mark of a frozen parameter: it says where its values are."""
        digest = hashlib.sha256(f"{self.checksum} {spec.name}".encode()).digest()
        return int.from_bytes(digest[:7], "little") if state.topology.number == 0 else 0


def _seen(state: ShardedModel) -> object:
    """Equal as long as no frozen parameter changes, and the same ones are frozen."""
    records = frozen_records(state)
    keys = [record.spec.key for record in records]
    if state.topology.ranks == 1:  # their seals are not looked at
        return keys, [(id(p), p._version) for p in (r.parameter() for r in records)]
    state.validity.notice_parameters(keys)
    return keys, state.validity.generations.of(keys)


def _no_tensors(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    raise CheckpointError(f"{name} is a tensor, which a peek does not read")


class _Timed:
    """Adds the seconds of a block to a name."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self._begun
        self._seconds[self._name] = self._seconds.get(self._name, 0.0) + spent
