"""What the memory of each node holds, and what all nodes have between them.

    steps/<step>-<start>/   the state of the node's own ranks, and of those of the node before it
    frozen/<id>/            all frozen parameters (`frozen`)

    save     each rank's file in its node's memory ─▶ the next node's memory ─▶ a record on every node
    restart  records of all nodes ─▶ the newest step whose files all exist ─▶ files to nodes that need them

Each is a checkpoint (`models.checkpointing.format`) of its own, which stays while the next is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from fcdp_compile.core.params.mesh import Topology, everyone_ranks
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.format.disk import DataFiles, Disk
from fcdp_compile.models.checkpointing.format.record import (
    RECORD,
    CheckpointRecord,
    DataFile,
    file_name,
    folder_of,
    read_record,
)
from fcdp_compile.models.survival.exchange import Sent, send_files

FROZEN, STEPS = "frozen", "steps"
OF_FROZEN = "frozen"
"""In what a step keeps as `extra`: the checksum of the frozen parameters that belong to the step."""


class NeighboursMemory(Disk):
    """Saves to the memory of each node, and of the next one.  memory: the folder of this rank's node."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory

    def leads(self, topology: Topology) -> bool:
        """One rank of each node leads."""
        return topology.number % (topology.ranks_per_node * topology.sharers) == 0

    def spread(
        self,
        folder: Path,
        files: Sequence[DataFile],
        topology: Topology,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Send each rank's file to the rank at its place of the next node."""
        if topology.nodes == 1:
            return
        ranks, step = everyone_ranks(topology), topology.ranks_per_node * topology.sharers
        by_number = [rank for _, rank in sorted(ranks.items())]
        sent = [
            Sent(
                path=folder.relative_to(self._memory) / file_name(number),
                size_bytes=file.size_bytes,
                source=by_number[number],
                target=by_number[(number + step) % len(files)],
            )
            for number, file in enumerate(files)
        ]
        send_files(sent, self._memory, group, "sending a step's state to the next node's memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A checkpoint of which a node has the record.

    folder: within the memory.  frozen: for a step, the checksum of its frozen parameters.
    sizes: of the files of all ranks.  files: the ranks whose files are there.
    """

    folder: Path
    checksum: str
    id: str
    step: int
    frozen: str | None
    layout: tuple[int, int, int]
    sizes: tuple[int, ...]
    record_bytes: int
    files: frozenset[int]


def kept_in(memory: Path, *, verifies: bool = False) -> list[Kept]:
    """What a node has, without what has a damaged record.

    verifies: whether to read all files, and to leave out those that are damaged.
    """
    return [
        kept
        for kind in (FROZEN, STEPS)
        for folder in sorted(memory.glob(f"{kind}/*"))
        if (kept := _kept(memory, folder, verifies=verifies)) is not None
    ]


def _kept(memory: Path, folder: Path, *, verifies: bool) -> Kept | None:
    try:
        record = read_record(folder)
        record_bytes = (folder / RECORD).stat().st_size
    except (CheckpointError, OSError):
        return None
    values = {value.name: value.tree for value in reversed(record.values)}
    extra, step = values.get("extra"), values.get("step")
    frozen = extra.get(OF_FROZEN) if isinstance(extra, dict) else None
    files = DataFiles(folder, record)
    return Kept(
        folder=folder.relative_to(memory),
        checksum=record.checksum,
        id=record.id,
        step=step if isinstance(step, int) else 0,
        frozen=frozen if isinstance(frozen, str) else None,
        layout=record.layout,
        sizes=tuple(file.size_bytes for file in record.files),
        record_bytes=record_bytes,
        files=frozenset(_intact(files, record, verifies=verifies)),
    )


def _intact(files: DataFiles, record: CheckpointRecord, *, verifies: bool) -> Iterator[int]:
    """The ranks whose files are there, with the right size, and if `verifies` the right bytes."""
    for number, file in enumerate(record.files):
        path, size = files.path(number), file.size_bytes
        try:
            if path.stat().st_size != size:
                continue
            if verifies:
                files.verify(files.blocks([(number, 0, size)]), lambda count: None)
        except (OSError, CheckpointError):
            continue
        yield number


class Found:
    """What all nodes have between them.  nodes: what each node has.

    is_any: whether there is anything.
    steps: those of which each file is on some node, with their frozen parameters, the newest first.
    """

    def __init__(self, nodes: Sequence[Iterable[Kept]]) -> None:
        self._nodes = [{kept.checksum: kept for kept in of_one} for of_one in nodes]
        everything: dict[str, Kept] = {}
        for of_one in self._nodes:
            everything |= of_one
        self.is_any = bool(everything)
        whole = {
            checksum: kept
            for checksum, kept in everything.items()
            if self._holders(kept).keys() >= set(range(len(kept.sizes)))
        }
        steps = [(k, whole[k.frozen]) for k in whole.values() if k.frozen in whole]
        self.steps = sorted(steps, key=lambda pair: (-pair[0].step, str(pair[0].folder)))

    def _holders(self, kept: Kept) -> dict[int, list[int]]:
        """The nodes that have each file."""
        found: dict[int, list[int]] = {}
        for node, of_one in enumerate(self._nodes):
            if kept.checksum in of_one:
                for number in of_one[kept.checksum].files:
                    found.setdefault(number, []).append(node)
        return found

    def missing(
        self, kept: Kept, wanted: Mapping[int, Iterable[int]], ranks: Mapping[int, Sequence[int]]
    ) -> list[Sent]:
        """What nodes want and do not have, each from a node that has it; and records.

        wanted: the ranks whose files each node wants.  ranks: the ranks of each node, in a CPU group.
        """
        holders, sent = self._holders(kept), []
        with_record = [n for n, of_one in enumerate(self._nodes) if kept.checksum in of_one]
        data = kept.folder / folder_of(kept.id)
        for node, numbers in wanted.items():
            for number in sorted(set(numbers)):
                if node not in (nodes := holders[number]):
                    mine, theirs = ranks[node], ranks[nodes[node % len(nodes)]]
                    sent.append(
                        Sent(
                            path=data / file_name(number),
                            size_bytes=kept.sizes[number],
                            source=theirs[number % len(theirs)],
                            target=mine[number % len(mine)],
                        )
                    )
            if node not in with_record:
                sent.append(
                    Sent(
                        path=kept.folder / RECORD,
                        size_bytes=kept.record_bytes,
                        source=ranks[with_record[node % len(with_record)]][0],
                        target=ranks[node][0],
                    )
                )
        return sent
