"""Write all ranks' parts as one new checkpoint, or keep the old one and raise an error on every rank.

    every rank sees rank 0's folder -> each rank's file is on the disk -> rank 0 names them in the record

After each step all ranks learn whether every rank succeeded (`together`); no rank goes on alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from fcdp_compile.checkpointing.contents import JobContents
from fcdp_compile.checkpointing.format.disk import Disk
from fcdp_compile.checkpointing.format.marks import mark_of_all
from fcdp_compile.checkpointing.format.record import (
    BLOCK_BYTES,
    CheckpointRecord,
    DataFile,
    LeftOut,
    SavedValue,
    folder_of,
    seal,
)
from fcdp_compile.checkpointing.progress import bar
from fcdp_compile.errors import CheckpointError
from fcdp_compile.files.safetensors_writer import TensorMeta
from fcdp_compile.params.mesh import Topology
from fcdp_compile.ranks.all_or_none import together

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """One rank's file, and the values whose tensors are in it.

    left_out: the parameters that were left out; each mark is this rank's part of the mark.
    """

    file: DataFile
    left_out: list[LeftOut]
    values: list[SavedValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One save: its contents, its folder, the ranks that save and a group of them all."""

    contents: JobContents
    folder: Path
    topology: Topology
    group: dist.ProcessGroup | None
    disk: Disk
    progress: bool

    @property
    def _rank(self) -> int:
        return self.topology.number

    def run(self) -> None:
        """Write, with all ranks of the group.

        Raises: CheckpointError on every rank if one fails; the folder then still has its previous checkpoint.
        """
        new = self._step(self._begin)[0]
        try:
            digests = self._step(lambda: self._look(new))
            names = list(self.contents.values)
            alike = {n for i, n in enumerate(names) if len({d[i] for d in digests}) == 1}
            written = self._step(lambda: self._write(new, alike))
            self._step(lambda: self._decide(new, written))
        except BaseException:
            if self._rank == 0:
                self.disk.take_back(self.folder, new)
            raise
        # All ranks wait for the sweep, so that the folder holds one checkpoint when `run` returns.
        self._step(self._sweep)

    def _step(self, act: Callable[[], T]) -> list[T]:
        """Call `act` on every rank; return the results in the mesh's order, which may not be the group's."""
        doing = f"saving to {self.folder}"
        everyone = together(self.group, lambda: (self._rank, act()), CheckpointError, doing)
        return [value for _, value in sorted(everyone, key=lambda given: given[0])]

    def _sweep(self) -> None:
        if self._rank == 0:
            self.disk.sweep(self.folder)

    def _begin(self) -> str:
        if self._rank != 0:
            return ""
        new = secrets.token_hex(8)
        try:
            self.disk.make_folders(self.folder, new)
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.folder}: {error.strerror}") from error
        self.disk.sweep(self.folder, new=folder_of(new))
        return new

    def _look(self, id: str) -> list[str]:
        if not (self.folder / folder_of(id)).is_dir():
            raise CheckpointError(
                f"{self.folder} is another folder on this rank than on rank 0; save to a folder that "
                "all nodes share"
            )
        return [value.digest() for value in self.contents.values.values()]

    def _write(self, id: str, alike: set[str]) -> _Written:
        mine = [
            SavedValue(name=name, rank=None if name in alike else self._rank, tree=value.tree)
            for name, value in self.contents.values.items()
            if self._rank == 0 or name not in alike
        ]
        tensors = dict(self.contents.parts)
        for value in mine:
            tensors |= self.contents.values[value.name].tensors
        metas = {n: TensorMeta(dtype=t.dtype, shape=tuple(t.shape)) for n, t in tensors.items()}
        total_bytes = sum(meta.size_bytes for meta in metas.values())
        try:
            with ExitStack() as stack:
                shown = self.progress and self._rank == 0
                shown_bar = stack.enter_context(bar("saving", total_bytes, shown=shown))
                writer, sums = self.disk.open_data(
                    self.folder, id, self._rank, metas, shown_bar.update
                )
                with writer:
                    for name, tensor in tensors.items():
                        writer.write(name, tensor)
            self.disk.reached("synced data")
            self.disk.sync_folder(self.folder / folder_of(id))
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.folder / folder_of(id)}: {error.strerror}; {self.folder} has the "
                "checkpoint that it had"
            ) from error
        return _Written(file=sums.file(), left_out=self.contents.left_out, values=mine)

    def _decide(self, id: str, written: list[_Written]) -> None:
        if self._rank != 0:
            return
        record = CheckpointRecord(
            checksum="",
            id=id,
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
