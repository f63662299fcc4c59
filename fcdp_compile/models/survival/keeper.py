"""`survive(model, optimizer)`: a job that loses a process or a node goes on from the memory of the nodes.

    memory of a node   all frozen parameters; the state of its own ranks, and of those of the node before
    restart            agree on the newest whole step, bring files to the nodes that lack them, load

Files have the format of checkpoints (`models.checkpointing`), so any number of nodes can go on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fcdp_compile.cluster.node_memory import NodeMemory, job_name, machine_mark, memory_root
from fcdp_compile.core.params.mesh import Topology, everyone_ranks
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.ranks.messages import first_other, together
from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import ArgumentError, CheckpointError
from fcdp_compile.models.checkpointing.contents import JobObjects
from fcdp_compile.models.checkpointing.format.record import read_record
from fcdp_compile.models.checkpointing.format.tree import decode
from fcdp_compile.models.checkpointing.loading import Loaded, load_from
from fcdp_compile.models.checkpointing.saving import PendingSave, save_on
from fcdp_compile.models.survival.exchange import send_files
from fcdp_compile.models.survival.frozen import KeptFrozen, keep_frozen
from fcdp_compile.models.survival.states import (
    FROZEN,
    STATES,
    Found,
    Kept,
    NeighboursMemory,
    kept_in,
)
from fcdp_compile.runtime.model import ShardedModel

log = logging.getLogger(__name__)

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

    base: gives the model its first values, called only if the nodes' memory has no state of this job.  If it
    returns what `fcdp_compile.load` has returned, the job goes on from that checkpoint's step.  None: the
    model has its values already.
    scheduler, scaler: as for `save`.
    every: after how many calls of `commit` the state is copied.
    job: names the job, the same after a restart, and different from other jobs; by default torchrun's
    --rdzv-id, or SLURM's job id.

    Raises: ArgumentError on every rank if the job has no id, or for a wrong argument; CheckpointError on
    every rank if the memory is that of another model; ValueError if the model is not sharded.
    """
    keeper = open_keeper(model, every=every, job=job)
    keeper.begin(
        JobObjects(optimizer=optimizer, scheduler=scheduler, scaler=scaler, extra=None), base
    )
    return keeper


def open_keeper(model: nn.Module, *, every: int, job: str | None) -> Keeper:
    """Do the first half of `survive`: look at what the nodes have.  `Keeper.begin` does the rest."""
    root, state = model_of(model), state_of(model)

    def check() -> tuple[str, str, str, int]:
        if type(every) is not int or every < 1:
            raise ArgumentError(f"every must be a whole number above 0, not {every!r}")
        root_folder = memory_root()
        return job_name(job), str(root_folder), machine_mark(root_folder), every

    told = together(state.topology.everyone, check, ArgumentError, _DOING)
    if (other := first_other([(name, steps) for name, _, _, steps in told])) is not None:
        raise ArgumentError(
            f"rank 0 calls survive for job {told[0][0]!r} with every={told[0][3]}, rank {other} for "
            f"{told[other][0]!r} with every={told[other][3]}; give the same on every rank"
        )
    marks = [mark for _, _, mark, _ in told]
    memory = NodeMemory(memory_root(), told[0][0], _number_on_machine(state.topology, marks))
    together(state.topology.everyone, memory.hold, CheckpointError, _DOING)
    return Keeper(root, state, memory, every)


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
        self, root: nn.Module, state: ShardedModel, memory: NodeMemory, every: int
    ) -> None:
        self.step = 0
        self.extra: Any = None
        self.seconds: dict[str, float] = {}
        self._root, self._state = root, state
        self._memory, self._every = memory, every
        self._objects = JobObjects(optimizer=None, scheduler=None, scaler=None, extra=None)
        self._disk = NeighboursMemory(memory.folder)
        self._folder = STATES[0]
        self._frozen: str | None = None  # the checksum of what is kept of them
        self._pending = PendingSave()
        with _Timed(self.seconds, "look"):
            everyone = together(
                state.topology.everyone,
                lambda: kept_in(memory.folder),
                CheckpointError,
                _DOING,
            )
        ranks = everyone_ranks(state.topology)
        self._found = Found([everyone[ranks[node, 0, 0]] for node in range(state.topology.nodes)])

    def peek(self) -> Any:
        """What `commit` got as `extra` at the newest step; None without a step.  All ranks must call it."""
        states = self._found.states
        if not states:
            return None

        def look() -> Any:
            record = read_record(self._memory.folder / states[0].folder)
            if record.checksum != states[0].checksum:
                return None
            trees = [v.tree for v in record.values if v.name == "extra" and not v.rank]
            return trees[0]

        def read() -> Any:
            try:
                return look()
            except CheckpointError:
                return None

        everyone = together(self._state.topology.everyone, read, CheckpointError, _DOING)
        found = next(tree for tree in everyone if tree is not None)
        return decode(found, _no_tensors, "extra")

    def begin(self, objects: JobObjects, base: Callable[[], object] | None) -> None:
        """Load the newest step, or else call `base`; `commit` then keeps these objects."""
        self._objects = objects
        if not self._restore() and base is not None:
            with _Timed(self.seconds, "base"):
                loaded = base()
            if isinstance(loaded, Loaded):
                self.step, self.extra = loaded.step or 0, loaded.extra

    # --- each step ------------------------------------------------------------------------------------------

    def commit(self, extra: Any = None) -> None:
        """Note that a step is done; every `every`-th time, copy the state to the nodes' memory.

        All ranks must call it after `optimizer.step()`.  Copies to host memory are made at once; a thread
        writes them and sends them to the next node, while training goes on.  The first copy takes longer,
        because it includes the frozen parameters.

        extra: as for `save`, such as the position in the data; `extra` of the keeper after a restart.

        Raises: as `save`; also what went wrong with the copy before, on every rank.
        """
        self.step += 1
        if self.step % self._every:
            return
        self._pending.wait()
        if self._frozen is None:
            folder = self._memory.folder / FROZEN
            self._frozen = keep_frozen(self._root, self._state, folder, self._disk)
        objects = JobObjects(
            optimizer=self._objects.optimizer,
            scheduler=self._objects.scheduler,
            scaler=self._objects.scaler,
            extra=extra,
        )
        folder = self._memory.folder / self._folder
        self._pending = save_on(
            self._disk,
            folder,
            self._root,
            objects,
            self.step,
            frozen=False,
            mark=self._mark,
            asynchronous=True,
        )
        self._folder = _other(self._folder)

    def _mark(self, state: ShardedModel, index: int, spec: ParamSpec, local: Tensor) -> int:
        """This rank's part of the mark of a frozen parameter: it says which frozen parameters are kept."""
        text = f"{self._frozen} {spec.name}"
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:7], "little") if state.topology.number == 0 else 0

    # --- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the job's memory: the job has ended and needs no state.  All ranks must call it."""
        self._pending.wait()
        everyone, leads = self._state.topology.everyone, self._disk.leads(self._state.topology)
        for act in (self._memory.release, lambda: self._memory.remove() if leads else None):
            together(everyone, act, doing="closing a keeper")

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
            self._memory.release()

    # --- after a restart ------------------------------------------------------------------------------------

    def _restore(self) -> bool:
        """Load the newest step that the nodes have between them; return whether there is one."""
        topology, found = self._state.topology, self._found
        frozen, states = found.frozen, found.states
        if frozen is None or not states:
            if found.is_any and topology.number == 0:
                log.warning(
                    "the nodes have memory of job %s, but no step of it is whole: two neighbouring nodes are "
                    "gone, or memory is damaged; the job starts from its checkpoint",
                    self._memory.job,
                )
            return False
        try:
            self._load_frozen(found, frozen)
        except CheckpointError as error:
            return self._gone(error)
        for kept in states:
            try:
                loaded = self._load_state(found, kept)
            except CheckpointError as error:
                self._gone(error)
                continue
            self.step, self.extra = loaded.step or 0, loaded.extra
            self._folder = _other(kept.folder)
            if topology.number == 0:
                log.warning(
                    "job %s goes on after step %d, from the memory of its nodes (%s)",
                    self._memory.job,
                    self.step,
                    ", ".join(f"{name} {s:.1f} s" for name, s in self.seconds.items()),
                )
            return True
        return False

    def _gone(self, error: CheckpointError) -> bool:
        if self._state.topology.number == 0:
            log.warning(
                "a copy in the nodes' memory of job %s is of no use: %s", self._memory.job, error
            )
        return False

    def _load_frozen(self, found: Found, kept: Kept) -> None:
        everyone = self._state.topology.everyone
        with _Timed(self.seconds, "fetch frozen"):
            self._fetch(found, kept, is_all=True)
        opened: list[KeptFrozen] = []

        def check() -> None:
            opened.append(KeptFrozen(self._root, self._memory.folder / FROZEN))
            opened[0].check()

        with _Timed(self.seconds, "read frozen"):
            together(everyone, check, CheckpointError, _DOING)
            (frozen,) = opened
            keys = together(everyone, frozen.fill, CheckpointError, _DOING)[0]
        self._state.validity.values_arrived(keys)
        self._state.transport.row_sources.offer(keys, frozen)
        self._frozen = kept.checksum

    def _load_state(self, found: Found, kept: Kept) -> Loaded:
        topology = self._state.topology
        here = (topology.nodes, topology.ranks_per_node, topology.sharers)
        with _Timed(self.seconds, "fetch state"):
            self._fetch(found, kept, is_all=kept.layout != here)
        with _Timed(self.seconds, "read state"):
            return load_from(
                self._memory.folder / kept.folder, self._root, self._objects, self._mark
            )

    def _fetch(self, found: Found, kept: Kept, *, is_all: bool) -> None:
        """Bring files to this node and others: all, or what each node's ranks had written, and rank 0's."""
        topology, ranks = self._state.topology, everyone_ranks(self._state.topology)
        per_node = topology.ranks_per_node * topology.sharers
        wanted = {
            node: range(len(kept.sizes))
            if is_all
            else [0, *range(node * per_node, (node + 1) * per_node)]
            for node in range(topology.nodes)
        }
        by_node = {
            node: [rank for (n, _, _), rank in sorted(ranks.items()) if n == node]
            for node in range(topology.nodes)
        }
        (self._memory.folder / kept.folder / f"data-{kept.id}").mkdir(parents=True, exist_ok=True)
        sent = found.missing(kept, wanted, by_node)
        send_files(sent, self._memory.folder, topology.everyone, "bringing a node what it lacks")


def _other(folder: str) -> str:
    return STATES[1 - STATES.index(folder)]


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
