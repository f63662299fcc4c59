"""What a job trains, in the memory of each node: its own ranks' files, and those of the node before it.

    save     each rank's file in its node's memory ─▶ the next node's memory ─▶ a record on every node
    restart  records of all nodes ─▶ the newest step whose files all exist ─▶ files to nodes that need them

A save has one of two folders, in turn, so that the last complete save stays while the next is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from fcdp_compile.core.params.mesh import Topology, everyone_ranks
from fcdp_compile.errors import CheckpointError
from fcdp_compile.models.checkpointing.format.disk import Disk
from fcdp_compile.models.checkpointing.format.record import (
    RECORD,
    DataFile,
    file_name,
    folder_of,
    read_record,
)
from fcdp_compile.models.survival.exchange import Sent, send_files

FROZEN = "frozen"
STATES = ("state-0", "state-1")


class NeighboursMemory(Disk):
    """Saves to the memory of each node, and of the next one.  memory: the folder of this rank's node."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory

    def leads(self, topology: Topology) -> bool:
        """One rank of each node leads."""
        return topology.number % (topology.ranks_per_node * topology.sharers) == 0

    def make_folders(self, folder: Path, id: str) -> None:
        """Make the folder of new data; what the folder had is older than what the other folder has."""
        if (folder / RECORD).exists():
            (folder / RECORD).unlink()
        super().make_folders(folder, id)

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
        by_number = [ranks[at] for at in sorted(ranks, key=lambda at: _number(topology, *at))]
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


def _number(topology: Topology, node: int, place: int, index: int) -> int:
    return (node * topology.ranks_per_node + place) * topology.sharers + index


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A checkpoint of which a node has the record.

    files: the ranks whose files are there, by the files' sizes.  sizes: of the files of all ranks.
    """

    folder: str
    checksum: str
    id: str
    step: int
    layout: tuple[int, int, int]
    sizes: tuple[int, ...]
    record_bytes: int
    files: frozenset[int]


def kept_in(memory: Path) -> list[Kept]:
    """What a node has; a folder whose record is damaged counts as empty."""
    found = []
    for name in (FROZEN, *STATES):
        folder = memory / name
        try:
            record = read_record(folder)
            record_bytes = (folder / RECORD).stat().st_size
        except (CheckpointError, OSError):
            continue
        sizes = tuple(file.size_bytes for file in record.files)
        steps = [value.tree for value in record.values if value.name == "step"]
        data = folder / record.folder
        found.append(
            Kept(
                folder=name,
                checksum=record.checksum,
                id=record.id,
                step=steps[0] if steps and isinstance(steps[0], int) else 0,
                layout=record.layout,
                sizes=sizes,
                record_bytes=record_bytes,
                files=frozenset(n for n, size in enumerate(sizes) if _size(data, n) == size),
            )
        )
    return found


def _size(data: Path, number: int) -> int | None:
    path = data / file_name(number)
    return path.stat().st_size if path.is_file() else None


class Found:
    """What all nodes have between them.  nodes: what each node has.

    is_any: whether there is anything.  frozen: the frozen parameters, if each of their files is on some node.
    states: the steps of which each file is on some node, the newest first.
    """

    def __init__(self, nodes: Sequence[Iterable[Kept]]) -> None:
        self._nodes = [{kept.checksum: kept for kept in of_one} for of_one in nodes]
        self._all: dict[str, Kept] = {}
        for of_one in self._nodes:
            self._all |= of_one

        whole = [
            k for k in self._all.values() if set(range(len(k.sizes))) <= self._holders(k).keys()
        ]
        whole.sort(key=lambda kept: (-kept.step, kept.checksum))
        frozen = [kept for kept in whole if kept.folder == FROZEN]
        self.is_any = bool(self._all)
        self.frozen = frozen[0] if frozen else None
        self.states = [kept for kept in whole if kept.folder != FROZEN]

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
        """The files that nodes want and do not have, each from a node that has it; records come last.

        wanted: the files that each node wants, by rank.  ranks: the ranks of each node, in a CPU group.
        """
        holders, sent = self._holders(kept), []
        with_record = [n for n, of_one in enumerate(self._nodes) if kept.checksum in of_one]
        data = Path(kept.folder) / folder_of(kept.id)
        for node, numbers in wanted.items():
            for number in sorted(set(numbers)):
                nodes = holders[number]
                if node not in nodes:
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
                        path=Path(kept.folder) / RECORD,
                        size_bytes=kept.record_bytes,
                        source=ranks[with_record[node % len(with_record)]][0],
                        target=ranks[node][0],
                    )
                )
        return sent
